"""The files of a published drafter: `config.json` and safetensors, from a folder or a repository of the Hub."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from specdec.errors import UnsupportedError

INDEX = "model.safetensors.index.json"


class LoadedModel:
    """A model that transformers has loaded, as a checkpoint: its configuration, and its own tensors, not copied.

    Args:
        model: with a `config` and weights.

    Raises:
        UnsupportedError: if weights of it are elsewhere (offloaded, say).
    """

    def __init__(self, model: Any) -> None:
        """Looks at the names; of tensors that are one and the same, the first name counts."""
        self.name = type(model).__name__
        self.config: dict[str, Any] = {**model.config.to_dict(), "architectures": [self.name]}
        self._tensors: dict[str, torch.Tensor] = {}
        known = set[tuple[Any, ...]]()
        for name, tensor in model.state_dict().items():
            if tensor.is_meta:
                raise UnsupportedError(f"{self.name}: tensor {name!r} holds no numbers here; load the model whole.")
            same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if same not in known:
                self._tensors[name] = tensor
            known.add(same)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors whose names are wanted, where they are."""
        return ((name, tensor) for name, tensor in self._tensors.items() if wanted(name))


class CheckpointFiles:
    """A checkpoint: its configuration, and its tensors by name, which are read one by one.

    Args:
        folder: where the files are.

    Raises:
        UnsupportedError: if a file is missing, or weights exist in another format only.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the configuration and the names of the tensors."""
        self.folder = folder
        path = folder / "config.json"
        if not path.is_file():
            raise UnsupportedError(f"{folder} has no config.json; expected the folder of a published drafter.")
        self.config = _read_object(path)
        self._files: dict[str, Path] = {}
        for file in self._weight_files():
            try:
                with safe_open(file, framework="pt") as tensors:
                    names = list(tensors.keys())
            except SafetensorError as error:
                raise UnsupportedError(f"{file} cannot be read: {error}.") from None
            twice = next((name for name in names if name in self._files), None)
            if twice is not None:
                raise UnsupportedError(f"{folder} has the tensor {twice!r} in two files.")
            self._files |= dict.fromkeys(names, file)

    def _weight_files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            places = _read_object(index).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise UnsupportedError(f"{index}: 'weight_map' must name a file for each tensor, got {places!r}.")
            files = sorted(set(places.values()))
        else:
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        missing = [name for name in files if not (self.folder / name).is_file()]
        if files and not missing:
            return [self.folder / name for name in files]
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern))
        hint = f"; {', '.join(other)} can run code when read and is not opened" if other else ""
        raise UnsupportedError(f"{self.folder} lacks {', '.join(missing) or 'safetensors files'}{hint}.")

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        with safe_open(self._files[name], framework="pt") as tensors:
            return tuple(tensors.get_slice(name).get_shape())

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors whose names are wanted, file by file, on the CPU; no other file is opened."""
        names = sorted((file, name) for name, file in self._files.items() if wanted(name))
        for file, group in itertools.groupby(names, key=lambda pair: pair[0]):
            with safe_open(file, framework="pt") as tensors:
                for _, name in group:
                    yield name, tensors.get_tensor(name)


Checkpoint = CheckpointFiles | LoadedModel
"""What a drafter is made of: a configuration, and tensors by name."""


def _read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file, which must be an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UnsupportedError(f"{path} is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UnsupportedError(f"{path} must hold an object of keys and values, got {type(content).__name__}.")
    return content


def open_checkpoint(path_or_repo: Any, *, revision: str | None = None) -> Checkpoint:
    """A loaded model, a folder, or a repository of the Hub, whose configuration and safetensors are downloaded."""
    if hasattr(path_or_repo, "state_dict") and hasattr(getattr(path_or_repo, "config", None), "to_dict"):
        return LoadedModel(path_or_repo)
    if not isinstance(path_or_repo, str | Path):
        raise UnsupportedError(
            f"expected a folder, a repository ('owner/name') or a drafter that transformers has loaded, got "
            f"{type(path_or_repo).__name__}."
        )
    folder = Path(path_or_repo)
    if not folder.is_dir():
        if isinstance(path_or_repo, Path) or str(path_or_repo).count("/") != 1:
            raise UnsupportedError(f"{path_or_repo!s} is neither a folder nor a repository ('owner/name').")
        patterns = ["*.json", "*.safetensors"]
        try:
            folder = Path(snapshot_download(str(path_or_repo), revision=revision, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise UnsupportedError(
                f"there is no folder {str(path_or_repo)!r} here, and no repository of the Hub could be had: {error}"
            ) from error
    return CheckpointFiles(folder)
