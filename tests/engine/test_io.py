"""Background work: two lanes, bounded, and an end that waits for what was begun."""

import threading

from kvcache_factory.engine.io import IOPool, Lane


def test_loads_go_before_stores() -> None:
    """Jobs that were queued while the thread was busy run by lane, then by age."""
    pool, order, gate = IOPool(1, 10, print), list[str](), threading.Event()
    pool.submit(Lane.LOAD, gate.wait)
    for lane, name in ((Lane.STORE, "s1"), (Lane.LOAD, "l1"), (Lane.STORE, "s2"), (Lane.LOAD, "l2")):
        pool.submit(lane, lambda name=name: order.append(name))
    gate.set()
    assert pool.wait(60)
    assert order == ["l1", "l2", "s1", "s2"]
    pool.close()


def test_lanes_are_bounded_and_a_closed_pool_takes_nothing() -> None:
    """What does not fit is refused, not queued without end."""
    pool, gate, began = IOPool(1, 2, print), threading.Event(), threading.Event()
    pool.submit(Lane.STORE, lambda: (began.set(), gate.wait()))
    assert began.wait(60)
    taken = [pool.submit(Lane.STORE, list) is not None for _ in range(4)]
    assert taken == [True, True, False, False]
    assert pool.submit(Lane.LOAD, list) is not None
    assert pool.wait(0) is False
    gate.set()
    pool.close()
    assert pool.submit(Lane.LOAD, list) is None
    assert pool.pending == 0
    pool.close()


def test_a_job_that_fails_is_reported_and_the_thread_goes_on() -> None:
    """An exception stays in its ticket and goes to the listener; the next job runs."""
    errors: list[Exception] = []
    pool = IOPool(1, 10, errors.append)
    bad, good = pool.submit(Lane.STORE, lambda: 1 / 0), pool.submit(Lane.STORE, list)
    assert bad is not None
    assert good is not None
    assert bad.wait(60)
    assert good.wait(60)
    assert pool.wait(60)
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.error is None
    assert [type(error) for error in errors] == [ZeroDivisionError]
    pool.close()


def test_no_thread_starts_before_the_first_job() -> None:
    """A pool that is not used costs nothing and closes at once."""
    before = threading.active_count()
    pool = IOPool(8, 10, print)
    assert threading.active_count() == before
    assert pool.wait(0)
    pool.close()
