"""The verifier that a generator takes when its user names none."""

from specdec.protocols import StepVerifier, TreeBuilder
from specdec.verify.rejection import Rejection
from specdec.verify.target_only import TargetOnly
from specdec.verify.tree_rejection import TreeRejection


def default_verifier(builder: TreeBuilder, *, do_sample: bool) -> StepVerifier:
    """A lossless rule that fits the trees of `builder` and every request.

    Only stepwise rules are chosen: they see the target's law of committed tokens alone, so logits processors that
    keep state work. `BlockVerification` and `Traversal` accept somewhat more of sampled drafts; ask for them by name
    when the request has no such processor.

    Args:
        builder: grows the trees that will be verified.
        do_sample: False for greedy decoding, where each rule accepts the same tokens and `TargetOnly` is the
            cheapest.

    Returns:
        `TargetOnly` for deterministic trees and greedy requests, else `Rejection` for chains and `TreeRejection` for
        trees.

    Example:
        >>> from specdec import trees
        >>> from specdec.verify import default_verifier
        >>> type(default_verifier(trees.Sampled((2, 1)), do_sample=True)).__name__
        'TreeRejection'
    """
    if not (do_sample and builder.sampled):
        return TargetOnly()
    return Rejection() if builder.chain else TreeRejection()
