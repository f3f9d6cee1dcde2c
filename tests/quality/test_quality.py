"""The command that measures codecs, with a model of two layers over bytes in the place of the demo's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from tests.demo.small import small_model

from kvcache_factory.cli import main
from kvcache_factory.codec import calibration
from kvcache_factory.errors import ConfigError
from kvcache_factory.quality import blocks, run
from kvcache_factory.quality.run import Plan, run_quality

PLAN = Plan(windows=1, tokens=256, forward=16, greedy=4, depths=(0.5,))
KEYS = ("method", "ratio", "kl", "top1", "ppl", "recall_ppl", "encode_gbps", "decode_gbps", "max_rel_error")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "load_model", small_model)
    monkeypatch.setattr(blocks, "_REPEATS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvcache_factory.quality.calibrate.WINDOWS", 1)


def test_rows_say_what_a_codec_costs() -> None:
    """Raw and lossless codecs cost nothing, four bits more than eight, and all of it is in the row."""
    rows = {row["method"]: row for row in run_quality(["raw", "bf16x", "int8", "rot4"], plan=PLAN)}
    assert all(key in row for row in rows.values() for key in KEYS)
    for exact in ("raw", "bf16x"):
        assert rows[exact]["kl"] == pytest.approx(0, abs=1e-6)
        assert (rows[exact]["top1"], rows[exact]["greedy_tokens"], rows[exact]["max_rel_error"]) == (1, 4, 0)
    assert rows["raw"]["ratio"] == 1
    assert 0 < rows["int8"]["kl"] < rows["rot4"]["kl"]
    assert 0 < rows["int8"]["rms_rel_error"] < rows["rot4"]["rms_rel_error"]
    assert rows["rot4"]["ratio"] > 2.2 > rows["int8"]["ratio"] > 1.3  # heads of 8 channels have many scales
    assert all(row["encode_gbps"] > 0 for row in rows.values() if row["method"] != "raw")


def test_a_knob_is_turned_to_the_ratio_and_the_calibration_is_made_once(tmp_path: Path) -> None:
    """Both calibrated methods come near what was asked for, with one table in the user's cache."""
    tables = tmp_path / "kvcache-factory" / "calibrations"
    tables.mkdir(parents=True)
    (tables / "kvcache-factory.00.kvcal").write_bytes(b"half of one")  # passed over
    for ratio in (2.0, 4.0):
        methods = ["pca:max_rel_error=1", "low_rank"] if ratio < 3 else ["pca:max_rel_error=1"]
        for row in run_quality(methods, plan=PLAN, ratio=ratio):
            assert row["ratio"] == pytest.approx(ratio, rel=0.35), row
    assert len(list(tables.iterdir())) == 2


def test_the_first_block_stays_as_it_is() -> None:
    from kvcache_factory.codec.names import make_codec
    from kvcache_factory.quality.reader import Reader

    model, tokenizer = small_model()
    reader = Reader(model, 64)
    codec = make_codec("rot4")
    codec.open(reader.spec)
    kv = reader.read(tokenizer("x" * 256)["input_ids"])
    coded = blocks.through(codec, kv, reader.spec)
    assert np.array_equal(coded.kv[:, :, :, :64], kv[:, :, :, :64])
    assert (coded.kv[:, :, :, 64:] != kv[:, :, :, 64:]).any()
    assert coded.blocks == 3


def test_the_command_prints_rows_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "QUICK", PLAN)
    picture = tmp_path / "quality.png"
    done = CliRunner().invoke(main, ["quality", "--quick", "--method", "int8", "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["command"] == "quality"
    assert set(KEYS) <= set(found["rows"][0])
    assert picture.stat().st_size > 1000


def test_a_method_without_a_knob_says_that_it_was_not_turned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a text of one's own is read."""
    monkeypatch.setattr(run, "QUICK", PLAN)
    text = tmp_path / "own.txt"
    text.write_text("The keeper of the lighthouse is called Ada. " * 40)
    asked = ["quality", "--quick", "--method", "int8", "--method", "l2norm", "--ratio", "3", "--text", str(text)]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "int8: the ratio is 1." in done.stderr
    assert "l2norm" not in done.stderr
    text.write_bytes(b"\xff\xfe\xfa")
    assert "--text" in CliRunner().invoke(main, asked).output
    text.write_text("short")
    assert "tokens" in CliRunner().invoke(main, asked).output


def test_calibrate_writes_a_table(tmp_path: Path) -> None:
    arguments = ["calibrate", "--windows", "1", "--tokens", "256", "--out", str(tmp_path / "tables"), "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert "too little" not in done.stderr
    assert Path(row["table"]).exists()
    assert (row["layers"], row["heads"], row["tokens"]) == (2, 2, 256)
    assert len(row["fingerprint"]) == 32
    named = json.loads(CliRunner().invoke(main, [*arguments, "--model-id", "ours"]).stdout)["rows"][0]
    assert named["fingerprint"] != row["fingerprint"]


def test_calibrate_says_when_it_has_read_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as a group of layers has channels, or fewer; here the model seems to be a wider one."""
    wide = calibration.Part(slice(0, 2), *(np.zeros(128, np.float32),) * 3)
    real = calibration.load
    monkeypatch.setattr(calibration, "load", lambda file: msgspec.structs.replace(real(file), keys=[wide]))
    arguments = ["calibrate", "--windows", "1", "--tokens", "64", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "64 tokens say too little about 128 channels" in done.stderr


@pytest.mark.parametrize("method", ["zip", "int8:bits=3", "pca:step=nothing"])
def test_what_cannot_work_is_said_before_anything_takes_long(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load_model", lambda *_: pytest.fail("the model was loaded"))
    done = CliRunner().invoke(main, ["quality", "--method", method])
    assert done.exit_code == 2
    assert "codec" in done.output


def test_what_the_model_cannot_have_is_said_before_its_text_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A group that does not divide, and a table that is none."""
    monkeypatch.setattr(run, "_read", lambda *_: pytest.fail("the text was read"))
    done = CliRunner().invoke(main, ["quality", "--method", "int4g:group=48"])
    assert done.exit_code == 2
    assert "use one of 2, 4, 8" in done.output
    table = tmp_path / "table.kvcal"
    table.write_bytes(b"half of one")
    done = CliRunner().invoke(main, ["quality", "--method", "pca", "--table", str(table)])
    assert done.exit_code != 0
    assert "table.kvcal" in done.output


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    done = CliRunner().invoke(main, ["calibrate", "--text", str(text), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "tokens" in done.output
    with pytest.raises(ConfigError, match="no model"):
        run_quality(["int8"], model=tmp_path, plan=PLAN)
