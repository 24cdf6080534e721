"""What a training run is told, and what it has done so far."""

from dataclasses import dataclass, field

LONG = 4  # long windows are so many times as long


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is told. Times in seconds, of training alone; parts are of `seconds`."""

    seconds: float
    seed: int = 0
    batch: int = 64
    length: int = 1024
    muon_lr: float = 4e-3
    adam_lr: float = 2e-3
    decay: float = 0.1
    balance: float = 1e-3
    warm_steps: int = 100
    cool: float = 0.6
    quantized: float = 0.35
    long: float = 0.12
    loop_rows: int = 2
    way: str = "grouped"
    backend: str = "flash"
    compiled: bool = True


@dataclass(slots=True)
class Run:
    """What a run has done so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict] = field(default_factory=list)
    failure: str = ""
