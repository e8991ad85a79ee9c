"""The settings of exports and of the server. The help of the command line reads them, so none of this needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.base.settings import Settings, setting
from stoker.base.units import parse_size


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """What an export has; :func:`stoker.export` describes each setting."""

    rows: Literal["fp32", "bf16", "int8", "int4"] = setting("fp32", "Format of the rows.")
    pt2: bool = setting(False, "Write the dense part as a torch.export program, too.", options=("--pt2",))
    onnx: bool = setting(False, "Write the dense part as an ONNX model, too.", options=("--onnx",))
    overwrite: bool = setting(False, "Replace an earlier export.", options=("--overwrite",))


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings, panel="Server"):
    """Addresses, limits and times."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0: all addresses of the machine.")
    port: int = setting(8000, "Port; 0 lets the system choose one.", least=0, most=65535)
    workers: int = setting(
        1, "Processes that answer. Each loads the rows of a run; those of an export are shared.", least=1, most=256
    )
    wait: float = setting(2.0, "Milliseconds that a request waits under load to share a batch.", least=0, most=600_000)
    batch_rows: int = setting(1024, "Rows of a batch; a larger request is one batch.", least=1)
    retrieve: Literal["off", "exact", "approximate"] = setting(
        "off", "How POST /retrieve finds the best items, of a two-tower model."
    )
    max_waiting: int = setting(256, "Requests that may wait; others get 503 with Retry-After.", least=1)
    max_body: int | str = setting("16MiB", "Bytes of a request; larger ones get 413.", least=1, parse=parse_size)
    read_timeout: float = setting(10.0, "Seconds in which a request must arrive; slower ones get 408.", least=0.001)
    poll: float = setting(0.5, "Seconds between two checks for updates of the run.", least=0.001)
