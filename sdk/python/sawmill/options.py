"""Options of a device: their names, those that a driver requests, and those in effect.

A driver requests few; the host has a default for each. Three places are searched, in this order:
the arguments of `serve` and similar functions, the device's attribute `options`, the device's
attributes with an option's name. The methods of the device determine the rest (device.py).
docs/format/driver.md explains each option.
"""

from dataclasses import dataclass, fields

from .errors import ProtocolError
from .wire import ControlFacts

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size_bytes(text: int | str) -> int:
    """A number of bytes from 4096, "64M", "2G" (powers of 1024)."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    digits, unit = (text[:-1], text[-1:].upper()) if isinstance(text, str) else ("", "")
    if unit in UNITS and digits.isascii() and digits.isdigit():
        return int(digits) * UNITS[unit]
    if isinstance(text, str) and text.isascii() and text.isdigit():
        return int(text)
    raise ValueError(f"{text!r} is not a size: use bytes, or a number followed by K, M, G or T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a driver requests. None: the host's option, or its default.
    Sizes may be text such as "64M"."""

    mode: str | None = None
    size: int | str | None = None
    blocksize: int | None = None
    byte_granular: bool | None = None
    hw_queues: int | None = None
    queue_depth: int | None = None
    request_bytes_max: int | str | None = None
    read_only: bool | None = None
    can_flush: bool | None = None
    can_fua: bool | None = None
    can_discard: bool | None = None
    can_write_zeroes: bool | None = None
    recoverable: bool | None = None
    on_death: str | None = None
    death_timeout_s: float | None = None
    request_timeout_s: float | None = None
    io_min: int | str | None = None
    io_opt: int | str | None = None
    collision_area_size: int | str | None = None
    write_chunk_size: int | str | None = None
    write_shm_size: int | str | None = None
    read_shm_size: int | str | None = None
    weak_flush: bool | None = None
    no_scheduler: bool | None = None
    chunk_age_max_ms: int | None = None


NAMES = tuple(field.name for field in fields(Options))
TEXTS = ("mode", "on_death")
SECONDS = ("death_timeout_s", "request_timeout_s")
SIZES = ("size", "request_bytes_max", "io_min", "io_opt") + NAMES[
    NAMES.index("collision_area_size") :
][:4]


def requested(device: object, arguments: dict[str, object]) -> dict[str, object]:
    """The options of arguments and attributes, as they are sent to the host."""
    unknown = sorted(set(arguments) - set(NAMES))
    if unknown:
        raise TypeError(f"{unknown[0]!r} is not an option; the options are: {', '.join(NAMES)}")
    own = getattr(device, "options", None)
    options: dict[str, object] = {}
    for name in NAMES:
        value = arguments.get(name)
        if value is None and isinstance(own, Options):
            value = getattr(own, name)
        if value is None:
            value = getattr(device, name, None)
        if value is not None:
            options[name] = spelled(name, value)
    return options


def spelled(name: str, value: object) -> object:
    """An option's value, as it is sent to the host."""
    if name in TEXTS and isinstance(value, str):
        return value
    if name in SIZES and isinstance(value, (int, str)):
        return size_bytes(value)
    if name in SECONDS and isinstance(value, (int, float)) and 0 <= value < float("inf"):
        return value
    if name not in TEXTS + SIZES + SECONDS and isinstance(value, int) and value >= 0:
        return int(value)
    raise ValueError(f"invalid value for option {name}: {value!r}")


@dataclass(frozen=True)
class Effective:
    """The options in effect, from the host's WELCOME: those that a driver needs as attributes, and
    all in `facts`."""

    batch: bool
    size: int
    blocksize: int
    area_bytes: int
    chunk_bytes: int
    metadata_bytes: int
    facts: ControlFacts

    @classmethod
    def of(cls, facts: ControlFacts) -> "Effective":
        """The options of a WELCOME packet."""
        mode = facts.get("mode")
        if mode not in ("plain", "batch"):
            raise ProtocolError(f"the host sent mode={mode}")
        batch = mode == "batch"
        areas, chunks, metadata = (
            facts.number(name) if batch else 0
            for name in ("collision_area_size", "write_chunk_size", "metadata_bytes")
        )
        if batch and (areas == 0 or metadata > chunks):
            raise ProtocolError("the host sent invalid chunk sizes")
        size, blocksize = facts.number("size"), facts.number("blocksize")
        return cls(batch, size, blocksize, areas, chunks, metadata, facts)
