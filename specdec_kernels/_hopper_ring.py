"""Tiles of keys and values on their way to shared memory, with the scales of their rows if they are codes.

A source is a tuple of tile descriptors, of rows and perhaps of scales. Its ring: room for tiles in flight, the barriers
that tell of their arrival, and room for scales.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # before triton 3.7


@gluon.constexpr_function
def _size(source):
    """Bytes of a tile and of its scales."""
    return sum(each.block_type.nbytes for each in source)


@gluon.constexpr_function
def _staged(tiles, stages):
    """Shape of so many tiles."""
    return [stages, *tiles.block_shape]


@gluon.jit
def fetch(sources, rings, batch, head, tile, columns, step, last, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Has the copy engine fill the stage of a step in each ring, if there is such a step."""
    if step < last:
        # In this order, since the threads meet between two operations on the same barrier.
        stage, slot = step % STAGES, (tile + step) * TILE
        for n in gl.static_range(len(sources)):
            mbarrier.expect(rings[n][1].index(stage), _size(sources[n]))
        for n in gl.static_range(len(sources)):
            if len(sources[n]) > 1:
                copy_tile(sources[n][1], [batch, head, slot], rings[n][1].index(stage), rings[n][2].index(stage))
        for n in gl.static_range(len(sources)):
            place = [batch, head, slot, columns[n]]
            copy_tile(sources[n][0], place, rings[n][1].index(stage), rings[n][0].index(stage))


@gluon.jit
def arrived(rings, step, TILE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """The tile of a step, once it is there."""
    stage = step % STAGES
    mbarrier.wait(rings[1].index(stage), (step // STAGES) & 1)
    if STAGES == 1:
        stage = here(0)
    return rings[0].index(stage).reshape([TILE, WIDTH])


@gluon.jit
def here(number):
    """The same number, of which the compiler knows nothing; what is computed from it stays where it is used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rings_for(source, STAGES: gl.constexpr):
    """Room for tiles in flight, the barriers that tell of their arrival, and room for scales, if there are any."""
    ring = gl.allocate_shared_memory(source[0].dtype, _staged(source[0], STAGES), source[0].layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    if len(source) == 1:
        return ring, full
    else:
        scales = gl.allocate_shared_memory(gl.float32, _staged(source[1], STAGES), source[1].layout)
        return ring, full, scales
