"""From values of the table to the configuration of a manager, over what a file says or over the documented defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ..cluster.opening import KEYS, options_of_places
from ..codec.names import named_codec
from ..connector.base import OptionsConnector, make_options, options_from_env
from ..connector.names import connector_class
from ..errors import ConfigError
from ..policy.names import make_policy
from .table import PREFIX, ROW_OF, ROWS, Row, pair

DOCUMENTED: dict[str, Any] = {
    "backend": {"type": "cpu", "size_gb": 10.0},
    "eviction_policy": {"name": "s3fifo", "options": {"threshold": 1, "small_ratio": 0.3}},
    "enable_metrics": True,
    "measure_stages": True,
    "block_tokens": -1,
    "chunk_tokens": 512,
}
"""The configuration that no variable at all means."""

MEMORY = ("cpu", "gpu")
CONNECTOR_PLACES = sorted({row.place.split(".")[0] for row in ROWS if row.place.split(".")[0].isupper()})
ALIASES = {"PRIS": "PRISKV"}


class Draft:
    """A configuration as plain data, taken apart: *config* without its levels, *policy*, and the levels."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.config = {name: value for name, value in data.items() if name not in ("backend", "eviction_policy")}
        self.backend = dict(data.get("backend", {"type": "cpu"}))
        policy = data.get("eviction_policy", {})
        self.policy = {"name": "lru", "options": {}, **policy}
        self.policy["options"] = dict(self.policy["options"])
        levels = self.backend.pop("levels") if self.backend.get("type") == "hierarchical" else [self.backend]
        self.levels = [dict(level) for level in levels]
        self.notes: list[str] = []

    @property
    def memory(self) -> dict[str, Any]:
        """The first level."""
        return self.levels[0]

    @property
    def remote(self) -> dict[str, Any] | None:
        """The remote level, which is the last, if there is one."""
        return self.levels[-1] if self.levels[-1].get("type") == "remote" else None

    def data(self) -> dict[str, Any]:
        """The configuration again."""
        backend = self.levels[0]
        if len(self.levels) > 1 or self.backend.get("type") == "hierarchical":
            marks = self.backend if self.backend.get("type") == "hierarchical" else {}
            backend = {**marks, "type": "hierarchical", "levels": self.levels}
        return {**self.config, "backend": backend, "eviction_policy": self.policy}

    # -- putting values in --------------------------------------------------------------------------------------------

    def apply(self, given: Mapping[str, Any]) -> None:
        """Put *given* values, by field, in their places; those that have none here are noted."""
        self._choose_levels(given)
        for row in ROWS:  # in this order a policy comes before its parameters
            if row.field not in given:
                continue
            field, value = row.field, given[row.field]
            part, _, name = row.place.partition(".")
            place = self._part(part)
            if place is None:
                if value or row.field != "meta_service_backend":  # which does something by saying nothing
                    self._note_useless(row)
            elif part == "policy":
                self._set_policy(row, name, value)
            elif part and row.field not in ("l2_cache_backend", "meta_service_backend"):
                place[name] = _PUT_AS.get(field, _as_it_is)(value)
        self._set_the_rest(given)

    def _choose_levels(self, given: Mapping[str, Any]) -> None:
        if "device" in given:
            self._rest_on(given["device"])
        if "l2_cache_backend" in given:
            self._choose_remote(given["l2_cache_backend"])
        if self.remote is not None and given.get("meta_service_backend") is not None:
            self.remote.pop("meta_service", None)
            if given["meta_service_backend"]:
                self.remote["meta_service"] = {"backend": given["meta_service_backend"]}

    def _rest_on(self, device: str) -> None:
        kept = {"size_gb": self.memory["size_gb"]} if "size_gb" in self.memory else {}
        if device == "cuda" and self.memory.get("type") == "cpu":
            self.levels[0] = {"type": "gpu", "device": "cuda", **kept}
        elif device == "cpu" and self.memory.get("type") == "gpu":
            self.levels[0] = {"type": "cpu", **kept}

    def _choose_remote(self, connector: str) -> None:
        connector = ALIASES.get(connector.upper(), connector if ":" in connector else connector.upper())
        before = self.remote
        if before is not None and before.get("connector") == connector:
            return
        if before is not None:
            self.levels.pop()
        if connector:
            kept = {name: value for name, value in (before or {}).items() if name != "options"}
            self.levels.append({**kept, "type": "remote", "connector": connector})

    def _part(self, part: str) -> dict[str, Any] | None:
        """The data that *part* of a place means; None where this configuration has no such part."""
        remote = self.remote
        if part in ("", "config"):
            return self.config
        if part == "policy":
            return self.policy
        if part == "memory":
            return self.memory
        if part == "remote":
            return remote
        if part == "meta":
            return None if remote is None else remote.get("meta_service")
        if remote is None or remote["connector"] != part:
            return None
        options: dict[str, Any] = remote.setdefault("options", {})
        return options

    def _set_policy(self, row: Row, name: str, value: Any) -> None:
        if name == "name":
            if value.lower() != self.policy["name"]:
                cap = self.policy["options"].get("max_size_gb")
                options = dict(DOCUMENTED["eviction_policy"]["options"]) if value.lower() == "s3fifo" else {}
                self.policy = {"name": value.lower(), "options": options | ({"max_size_gb": cap} if cap else {})}
        elif self.policy["name"] == "s3fifo":
            self.policy["options"][name] = value
        else:
            self._note_useless(row)

    def _set_the_rest(self, given: Mapping[str, Any]) -> None:
        """What is said by several values, or changes several places."""
        if given.get("profiling_enabled"):
            address = given.get("profiling_server_address", ROW_OF["profiling_server_address"].default)
            self.config["profiling_server"] = address
        elif "profiling_enabled" in given:
            self.config.pop("profiling_server", None)
        elif "profiling_server_address" in given and self.config.get("profiling_server"):
            self.config["profiling_server"] = given["profiling_server_address"]
        if "double_get_threshold" in given:
            if self.remote is None:
                self._note_useless(ROW_OF["double_get_threshold"])
            else:
                blocks, share = pair(given["double_get_threshold"])
                self.remote.update(double_get_blocks=blocks, double_get_ratio=share)
        if given.get("l1_cache_enabled") is False:
            self._without_memory()
            self._note_useless_of_memory(given)
        elif given.get("l1_cache_enabled"):
            self.memory.pop("staging", None)
        self._check_meta_service()
        self._check_codec(given)

    def _check_codec(self, given: Mapping[str, Any]) -> None:
        """A connector whose values have one length gets them as they are: the variable had no effect there before."""
        remote = self.remote
        if remote is None or not given.get("l2_cache_compression") or remote.get("codec") is None:
            return
        with contextlib.suppress(ConfigError):  # said elsewhere, with what to do
            made = connector_class(remote["connector"])
            if not (issubclass(made, OptionsConnector) and made.shorter_values):
                del remote["codec"]
                self.notes.append(
                    f"{PREFIX}L2_CACHE_COMPRESSION has no effect: {remote['connector']} takes values of one length only"
                )

    def _check_meta_service(self) -> None:
        remote = self.remote or {}
        service = remote.get("meta_service")
        if not service:
            return
        said = f"{PREFIX}META_SERVICE_BACKEND={service['backend']!r} needs {PREFIX}META_SERVICE_"
        schemes = ("http://", "https://") if service["backend"] == "ETCD" else ("redis://", "rediss://", "unix://")
        if not service.get("url", "").lower().startswith(schemes):
            raise ConfigError(f"{said}URL, which says where it is, such as {schemes[0]}host:port")
        if not service.get("key") and remote["connector"] not in KEYS:
            have = ", ".join(KEYS)
            raise ConfigError(f"{said}CLUSTER_META_KEY, the key of the membership; only {have} have one of their own")

    def _without_memory(self) -> None:
        """No DRAM tier: a bounded staging area takes its place above what is below."""
        remote = self.remote
        if remote is None:
            raise ConfigError(
                f"{PREFIX}L1_CACHE_ENABLED is off and {PREFIX}L2_CACHE_BACKEND names nothing: with both tiers off "
                "there is no cache; turn one on"
            )
        if len(self.levels) > 2:
            raise ConfigError(f"{PREFIX}L1_CACHE_ENABLED is off: the levels of the file between need memory above them")
        if remote.get("ingestion", "hot") != "all":
            raise ConfigError(
                f"{PREFIX}L2_CACHE_INGESTION_TYPE={remote.get('ingestion', 'hot').upper()!r} needs the DRAM tier, "
                f"which {PREFIX}L1_CACHE_ENABLED turns off; use ALL, or turn it on"
            )
        self.levels[0] = {"type": "cpu", "staging": True}
        self.policy = {"name": "fifo", "options": {}}

    def _note_useless_of_memory(self, given: Mapping[str, Any]) -> None:
        for row in ROWS:
            of_memory = row.field == "device" or row.place.startswith(("memory.", "policy."))
            if of_memory and given.get(row.field, row.default) != row.default:
                self.notes.append(f"{row.name} has no effect: {PREFIX}L1_CACHE_ENABLED is off")

    def _note_useless(self, row: Row) -> None:
        part = row.place.partition(".")[0]
        why = f"{PREFIX}L2_CACHE_BACKEND is {(self.remote or {}).get('connector', '')!r}"
        if part == "policy":
            why = f"the eviction policy is {self.policy['name'].upper()}"
        elif part == "meta" and self.remote is not None:
            why = f"{PREFIX}META_SERVICE_BACKEND names nothing"
        self.notes.append(f"{row.name} has no effect: {why}")

    # -- and out again ------------------------------------------------------------------------------------------------

    def value(self, row: Row) -> Any:
        """What the configuration says in the row's place; None where it says nothing."""
        if row.field == "l1_cache_enabled":
            return False if self.memory.get("staging") else None
        if row.field == "device":
            return "cuda" if self.memory.get("type") == "gpu" else None
        if row.field in ("profiling_enabled", "profiling_server_address"):
            server = self.config.get("profiling_server")
            return server and (True if row.field == "profiling_enabled" else server)
        if row.field == "double_get_threshold":
            found = [(self.remote or {}).get(name) for name in ("double_get_blocks", "double_get_ratio")]
            return None if found == [None, None] else ",".join(f"{x:g}" for x in found if x is not None)
        part, _, name = row.place.partition(".")
        place = self._part(part) if part else None
        if part == "policy" and name != "name":
            place = self.policy["options"]
        value = None if place is None else place.get(name)
        return value.upper() if row.field in _CAPITALS and value is not None else value


def _as_it_is(value: Any) -> Any:
    return value


_PUT_AS: dict[str, Callable[[Any], Any]] = {"l2_cache_ingestion_type": str.lower, "l2_cache_compression": named_codec}
_CAPITALS = ("l2_cache_ingestion_type", "l1_cache_eviction_policy")


def check_policy(draft: Draft, given: Mapping[str, Any]) -> None:
    """ConfigError, naming the variable, when the environment names a policy that cannot be made of what is said."""
    try:
        make_policy(draft.policy["name"], **draft.policy["options"])
    except ConfigError as error:
        if "l1_cache_eviction_policy" in given:
            name = given["l1_cache_eviction_policy"]
            raise ConfigError(f"{PREFIX}L1_CACHE_EVICTION_POLICY={name!r}: {error}") from None
        raise


def check_needs(draft: Draft) -> None:
    """Refuse a connector that has no default for what it needs."""
    remote = draft.remote or {}
    if remote.get("connector") == "EIC" and not remote.get("options", {}).get("config_file"):
        raise ConfigError(f"{PREFIX}L2_CACHE_BACKEND='EIC' needs {PREFIX}EIC_CONFIG_FILE, the path of its YAML file")


def options_of_others(draft: Draft, environ: Mapping[str, str], said_so: bool) -> set[str]:
    """Let a connector that is not of the table read its own variables; returns which it knows.

    *said_so*: the environment chose it.  Raises ConfigError for a connector that is not there, for a wrong value, and
    for an option that it has not.
    """
    remote = draft.remote
    if remote is None:
        return set()
    try:
        made = connector_class(remote["connector"])
    except ConfigError as error:
        raise ConfigError(
            f"{PREFIX}L2_CACHE_BACKEND={remote['connector']!r}: {error}" if said_so else str(error)
        ) from None
    if remote.get("meta_service"):
        options_of_places(remote["connector"])
    if not issubclass(made, OptionsConnector):
        return set()
    options = made.Options
    if remote["connector"] in CONNECTOR_PLACES:
        make_options(options, remote.get("options", {}))
        return set()
    prefixes = [PREFIX + prefix for prefix in (options.env_prefix, *options.env_older)]
    known = {prefix + field.upper(): field for prefix in prefixes for field in options.__struct_fields__}
    said = {known[name] for name in environ if name in known}
    read = options_from_env(options, environ, **remote.get("options", {}))
    if said:
        remote["options"] = {**{field: getattr(read, field) for field in said}, **remote.get("options", {})}
    return set(known)
