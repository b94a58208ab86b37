import numpy as np
from numpy.typing import NDArray

source_digest: str

def available_isas() -> list[str]: ...
def cpu_features() -> list[tuple[str, bool]]: ...
def kernel_names(isa: str) -> list[tuple[int, str | None]]: ...
def packed_bytes(layout: int, n: int, k: int) -> int: ...
def pack(
    layout: int, source: str, raw: NDArray[np.uint8], n: int, k: int, threads: int, out: NDArray[np.uint8]
) -> None: ...
def dequantise(source: str, raw: NDArray[np.uint8], n: int, k: int, out: NDArray[np.float32]) -> None: ...
def unpack(layout: int, data: NDArray[np.uint8], n: int, k: int, out: NDArray[np.float32]) -> None: ...
def probe_bandwidth(size_bytes: int, threads: int, seconds: float) -> float: ...
def probe_peak(isa: str, kind: int, threads: int, seconds: float) -> float: ...
def probe_barrier(threads: int) -> float: ...

class Vm:
    def __init__(
        self,
        records: bytes,
        arena_bytes: int,
        weights: list[tuple[int, int, int, NDArray[np.uint8]]],
        threads: int,
        isa: str,
        max_rows: int,
        max_sequences: int,
        max_outputs: int,
        max_top: int,
        kv_type: int,
        kv_layers: int,
        kv_heads: int,
        head_size: int,
        kv_blocks: int,
    ) -> None: ...
    def set_threads(self, threads: int) -> None: ...
    def step(
        self,
        tokens: NDArray[np.int32],
        token_types: NDArray[np.int32],
        positions: NDArray[np.int32],
        seq_starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        outputs: NDArray[np.uint8],
        results: NDArray[np.uint8],
        top_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
        count_ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        bias_ids: NDArray[np.int32],
        bias_values: NDArray[np.float32],
        masks: NDArray[np.uint32],
        num_records: int,
    ) -> None: ...
    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        seq_starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        outputs: NDArray[np.uint8],
        results: NDArray[np.uint8],
        top_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
        steps: int,
        stop_ids: NDArray[np.int32],
        stop_starts: NDArray[np.int32],
        wake_fd: int,
    ) -> int: ...
    def time_records(self, is_on: bool) -> None: ...
    def read_record_times(self, out: NDArray[np.int64]) -> None: ...
    def read_arena(self, offset: int, out: NDArray[np.float32]) -> None: ...
    def read_page(self, layer: int, block: int, head: int, is_value: bool, out: NDArray[np.float32]) -> None: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def isa(self) -> str: ...
