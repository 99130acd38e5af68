"""One round as text: the tree with its tokens and scores, and the path that was accepted."""

from collections.abc import Callable

from jaxtyping import Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.types import DraftTree, Round, Verdict


def render(
    tree: DraftTree | Round,
    outcome: Verdict | Int[Tensor, "batch depth"] | None = None,
    decode: Callable[[int], str] | None = None,
    *,
    row: int | None = None,
) -> str:
    """Draws a tree, one node a line, accepted nodes marked with `*`.

    Args:
        tree: the verified tree, or a whole round, which brings its own outcome.
        outcome: a verdict, or the accepted nodes from depth 1 on with -1 after the last one (`Round.path`); None for
            a tree that was not verified.
        decode: turns a token id into text, such as `lambda token: tokenizer.decode([token])`; None shows ids.
        row: batch row to draw; None draws all.

    Returns:
        Lines without a final newline. Scores are log-probabilities of the path from the root.

    Raises:
        IndexError: if the batch has no such row.
        UnsupportedError: if a round is given together with an outcome.

    Example:
        >>> import torch
        >>> from specdec import DraftTree, trees
        >>> tree = DraftTree(
        ...     tokens=torch.tensor([[7, 5, 6, 8]]), parents=torch.tensor([[-1, 0, 1, 0]]),
        ...     num_nodes=torch.tensor([4]), scores=torch.tensor([[0.0, -0.5, -1.25, -2.0]]),
        ... )
        >>> print(trees.render(tree, torch.tensor([[1, -1]])))
          node   score  token
        *    0    0.00  7
        *    1   -0.50  ├─ 5
             2   -1.25  │  └─ 6
             3   -2.00  └─ 8
        accepted 1 of 3
    """
    if isinstance(tree, Round):
        if outcome is not None:
            raise UnsupportedError(
                "render: a round brings its own outcome; name decode=, or give a tree with an outcome."
            )
        return render(tree.tree, tree.path, decode, row=row)
    batch = tree.tokens.shape[0]
    if row is not None and not 0 <= row < batch:
        raise IndexError(f"row {row} of a batch of {batch}: expected 0..{batch - 1}.")
    parts = []
    for index in range(batch) if row is None else [row]:
        title = [f"row {index}"] if batch > 1 else []
        parts.append("\n".join([*title, *_lines(tree, outcome, decode, index)]))
    return "\n\n".join(parts)


def _lines(
    tree: DraftTree,
    outcome: Verdict | Int[Tensor, "batch depth"] | None,
    decode: Callable[[int], str] | None,
    row: int,
) -> list[str]:
    """The lines of one batch row."""

    def show(token: int) -> str:
        # As a Python literal, so that spaces and line breaks are seen.
        return str(token) if decode is None else repr(decode(token))

    count = int(tree.num_nodes[row])
    tokens, scores = tree.tokens[row].tolist(), tree.scores[row].tolist()
    children: list[list[int]] = [[] for _ in range(count)]
    for node, parent in enumerate(tree.parents[row, :count].tolist()):
        if parent >= 0:
            children[parent].append(node)
    path = outcome.path if isinstance(outcome, Verdict) else outcome
    accepted = set() if path is None else {0, *path[row].tolist()} - {-1}

    lines = ["  node   score  token"]
    stack = [(0, "", "")]
    while stack:
        node, lead, indent = stack.pop()
        mark = "*" if node in accepted else " "
        lines.append(f"{mark} {node:4d} {scores[node]:7.2f}  {lead}{show(tokens[node])}")
        for child in reversed(children[node]):
            last = child == children[node][-1]
            stack.append((child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")))
    if path is None:
        return [*lines, f"{count - 1} drafted"]
    end = f"accepted {len(accepted) - 1} of {count - 1}"
    if isinstance(outcome, Verdict):
        end += f", bonus {show(int(outcome.bonus[row]))}"
    return [*lines, end]
