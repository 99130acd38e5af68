"""Many small tensors in one safetensors file: what belongs to one name stands there end to end.

Shapes are in tables of integers, one row for each thing written, and things are read in the order they were written.
"""

import math
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import UnsupportedError

FORMAT = {"format": "specdec.recording", "version": "1"}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of log-probabilities. In the file they share the widest one, which holds all values of the others."""


class Writer:
    """Collects rows of tables and tensors."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._tables: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def row(self, table: str, *values: int) -> None:
        """Appends a row to a table."""
        self._tables[table].append(values)

    def put(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor; ids and counts take 32 bits."""
        flat = tensor.detach().flatten()
        self._parts[name].append(flat if flat.is_floating_point() else flat.to(torch.int32))

    def write(self, path: str | Path) -> None:
        """Writes everything."""
        tensors = {f"table.{name}": torch.tensor(rows, dtype=torch.int64) for name, rows in self._tables.items()}
        save_file(tensors | {name: torch.cat(parts) for name, parts in self._parts.items()}, path, metadata=FORMAT)


class Reader:
    """Hands out what a `Writer` wrote, in the same order.

    Raises:
        UnsupportedError: if the file was not written by a `Writer` of this version.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the file."""
        try:
            with safe_open(path, framework="pt") as file:
                if (found := file.metadata()) != FORMAT:
                    raise UnsupportedError(f"{path} is not a recording of version 1: its metadata are {found}.")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise UnsupportedError(f"{path} cannot be read: {error}.") from None
        self._tables = {
            name.removeprefix("table."): tensor.tolist()[::-1]
            for name, tensor in tensors.items()
            if name.startswith("table.")
        }
        self._tensors, self._at = tensors, dict.fromkeys(tensors, 0)

    def rows(self, table: str) -> int:
        """Rows of a table that are left."""
        return len(self._tables.get(table, ()))

    def row(self, table: str) -> list[int]:
        """The next row of a table."""
        row: list[int] = self._tables[table].pop()
        return row

    def take(self, name: str, *shape: int) -> Tensor:
        """The next tensor of a name; integers come in 64 bits."""
        start, self._at[name] = self._at[name], self._at[name] + math.prod(shape)
        part: Tensor = self._tensors[name][start : self._at[name]].view(shape)
        return part if part.is_floating_point() else part.to(torch.int64)
