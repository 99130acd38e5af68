"""CPU benchmark of what rounding does to a recurrent state over a long text: 4,096 tokens, folded eight at a time.

    python examples/benchmarks/state_drift.py

A head of 128 x 128, as in Qwen3.5, runs chains of eight nodes and folds each of them whole, by the references of the
ops. States at rest are held in float32, float16 and bfloat16; or the state is in float32, and what the record says is
added to it is rounded to float16 or bfloat16. Everything is compared with float64 after every fold, and float64 itself
with a plain walk, token by token, before.
"""

import argparse
from dataclasses import dataclass

import report
import torch
from torch import Tensor

from specdec import ops

DIM, NODES = 128, 8
FORMS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32),
    "float16_state": (torch.float16, torch.float32),
    "bfloat16_state": (torch.bfloat16, torch.float32),
    "float16_records": (torch.float32, torch.float16),
    "bfloat16_records": (torch.float32, torch.bfloat16),
}
"""What the state is held in, and what updates are rounded to before they are folded."""


@dataclass(frozen=True)
class Text:
    """What the tokens of some texts ask, say and forget, `[texts, tokens, ...]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    def chain(self, start: int) -> tuple[Tensor, ...]:
        """The rows of the chain that begins at a token."""
        parts = (self.query, self.key, self.value, self.decay, self.beta)
        return tuple(part[:, start : start + NODES] for part in parts)


def usual(texts: int, tokens: int) -> Text:
    """Keys of any direction; decays of the size that layers are initialised to, 1 to 16 times 0.001 to 0.1 a token."""
    query, key, value = (torch.randn(texts, tokens, 1, DIM).bfloat16() for _ in range(3))
    rate = torch.empty(texts, 1, 1).uniform_(1, 16)
    step = torch.empty(texts, 1, 1).uniform_(-3, -1).mul_(torch.tensor(10.0).log()).exp_()
    spread = torch.nn.functional.softplus(torch.randn(texts, tokens, 1) + step.expm1().log())
    return Text(query, key, value, -rate * spread, torch.randn(texts, tokens, 1).sigmoid())


def hard(texts: int, tokens: int) -> Text:
    """Keys that are nearly the same (cosines of 0.98), full corrections, hardly any decay."""
    easy = usual(texts, tokens)
    key = torch.randn(texts, 1, 1, DIM) + (1 / 0.98 - 1) ** 0.5 * torch.randn(texts, tokens, 1, DIM)
    few = 1e-3 * torch.rand(2, texts, tokens, 1)
    return Text(easy.query, key.bfloat16(), easy.value, -few[0], 1 - few[1])


def main() -> None:
    """Measures all forms on both kinds of text and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures = {}
    for name, make in (("usual", usual), ("hard", hard)):
        text = make(arguments.texts, arguments.tokens)
        check(text)
        errors = drift(text, arguments.tokens)
        quarter = len(errors) // 4
        for form, course in zip(FORMS, errors.unbind(1), strict=True):
            figures[f"{name}.{form}"] = report.figure(float(course[-quarter:].mean()), "relative", "a float64 state")
            growth = float(course[-quarter:].mean() / course[quarter : 2 * quarter].mean())
            figures[f"{name}.{form}.growth"] = report.figure(growth, "times", "the error in the second quarter")
    report.write("state-drift", figures, device=report.cpu_name())


def drift(text: Text, tokens: int) -> Tensor:
    """Relative error of the state after each fold `[folds, forms]`, root mean square over the texts."""
    exact = empty(text, torch.float64)
    states = {form: empty(text, held) for form, (held, _) in FORMS.items()}
    errors = []
    for start in range(0, tokens, NODES):
        fold(text, start, exact, torch.float64)
        for form, (_, rounded) in FORMS.items():
            fold(text, start, states[form], rounded)
        size = exact.square().sum((1, 2, 3))
        off = [(state.double() - exact).square().sum((1, 2, 3)) / size for state in states.values()]
        errors.append(torch.stack([each.mean().sqrt() for each in off]))
    return torch.stack(errors)


def empty(text: Text, dtype: torch.dtype) -> Tensor:
    """The state before a text."""
    return torch.zeros(len(text.key), 1, DIM, DIM, dtype=dtype)


def fold(text: Text, start: int, state: Tensor, rounded: torch.dtype) -> None:
    """Runs the chain that begins at a token, and folds it whole."""
    batch = len(text.key)
    parents = torch.arange(-1, NODES - 1).expand(batch, -1)
    words, _ = ops.tree_layout(parents, torch.full((batch,), NODES))
    _, record = ops.gated_delta_tree(*text.chain(start), words, state, impl="reference")
    updates = record.updates.to(rounded).to(record.updates.dtype)
    path = ops.DeltaRecord(record.keys, updates, record.decays)
    ops.gated_delta_fold(state, path, torch.full((batch,), NODES), impl="reference")


def check(text: Text) -> None:
    """Two folds in float64 leave the state of a walk."""
    found, expected = empty(text, torch.float64), empty(text, torch.float64)[:, 0]
    for start in (0, NODES):
        fold(text, start, found, torch.float64)
    for token in range(2 * NODES):
        key, value = text.key[:, token, 0].double(), text.value[:, token, 0].double()
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        expected = expected * text.decay[:, token, :, None].double().exp()
        update = text.beta[:, token].double() * (value - torch.einsum("bkv,bk->bv", expected, key))
        expected = expected + key[:, :, None] * update[:, None]
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-10, atol=1e-10)


if __name__ == "__main__":
    main()
