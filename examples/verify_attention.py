"""One tree attended to by `ops.tree_attention`, compared with masked attention, and how its work would be split.

    python examples/verify_attention.py --context 32768

The op needs one bit per node where masked attention needs a row of the mask per node, and on a GPU it reads the cache
once for all of them.
"""

import argparse

import torch

from specdec import ops
from specdec.trees import topology

HEADS, KV_HEADS, DIM = 32, 8, 128


def main() -> None:
    """Attends to a random cache in both ways and prints the plan for a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true", help="a short context")
    arguments = parser.parse_args()
    context = 64 if arguments.tiny else arguments.context

    # The root, three guesses after it, and four more below the first two.
    parents = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 4]])
    nodes = parents.shape[1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query = torch.randn(1, HEADS, nodes, DIM, device=device)
    keys, values = torch.randn(2, 1, KV_HEADS, context + nodes, DIM, device=device)

    sees = topology.ancestor_matrix(parents).to(device)
    lengths = torch.tensor([context], device=device)
    output = ops.tree_attention(query, keys, values, topology.pack(sees), lengths)

    mask = torch.cat([sees.new_ones(1, nodes, context), sees], -1)
    masked = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask[:, None], enable_gqa=True
    )
    print(f"largest difference to masked attention: {float((output - masked).abs().max()):.1e}")
    print(f"mask: {nodes} words of the tree instead of {mask.numel()} entries over the context")
    if not torch.allclose(output, masked, atol=1e-3):
        raise SystemExit("The two differ: please report this.")

    shape = ops.AttentionShape(batch=1, heads=HEADS, kv_heads=KV_HEADS, rows=nodes, slots=context + nodes, dim=DIM)
    print(f"on a GPU: {ops.occupancy(shape, device if device == 'cuda' else None)}")
    print(f"one pass over the cache reads {shape.cache_bytes / 1e6:.1f} MB")
    can, reason = ops.available("tree_attention", device)
    print(f"kernel: {'yes' if can else reason}")


if __name__ == "__main__":
    main()
