"""Shared memory of a block of the backward, and the channels that fill it."""

from flashtile.kernels.sm90.backward.tile_scheduler import WORDS
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.ticket import Tickets, make_tickets, make_words
from flashtile.triton_glue.gluon import aggregate, gl, gluon


@aggregate
class Channels:
    """How the roles of a block hand tiles to one another."""

    tickets: Tickets
    keys: Channel
    queries: Channel
    douts: Channel  # where T.pipeline.joined that of queries, which alone are waited for and let go of
    scores: Channel  # the consumers' ds, to both
    sums: Channel  # their shares of dq, to the warps that add them
    biases: Channel  # where T.modifiers.early
    formers: Channel  # where T.outputs.pairs_ds
    edges: Channel  # where T.mask.blanks: by which the loader waits for tiles itself
    parts: Channel  # where T.pipeline.converts: by which who makes dq waits for the sum

    @gluon.constexpr_function
    def __init__(self, tickets, keys, queries, douts, scores, sums, biases, formers, edges, parts):
        self.tickets = tickets
        self.keys = keys
        self.queries = queries
        self.douts = douts
        self.scores = scores
        self.sums = sums
        self.biases = biases
        self.formers = formers
        self.edges = edges
        self.parts = parts


@aggregate
class BackwardMemory:
    """The tiles, and their channels."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor  # level and delta of every stage
    ds: gl.shared_memory_descriptor  # of two steps, for each consumer: as `backward.ds_of` says; without dk, room for dv
    shares: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor  # where T.modifiers.early: of one step, queries x 64 keys, for each consumer
    former: gl.shared_memory_descriptor  # likewise where T.outputs.pairs_ds: what a second entry's ds is added to
    part: gl.shared_memory_descriptor  # where T.pipeline.converts: of the sum of dq
    steps: gl.shared_memory_descriptor  # where T.tells: the numbers of every stage, as `visit.meeting` reads them
    to: Channels

    @gluon.constexpr_function
    def __init__(self, k, v, q, dout, rows, ds, shares, bias, former, part, steps, to):
        self.k = k
        self.v = v
        self.q = q
        self.dout = dout
        self.rows = rows
        self.ds = ds
        self.shares = shares
        self.bias = bias
        self.former = former
        self.part = part
        self.steps = steps
        self.to = to


@gluon.jit
def make_memory(descs, T: gl.constexpr):
    """Memory of a block; descs: BackwardDescriptors. Fence before specialising warps.

    A channel that no role uses is none of its own. On the order of channels it depends whether ptxas keeps words of dropout's
    loops in local memory.
    """
    BLOCK_Q: gl.constexpr = T.block_q
    KEY_TILES: gl.constexpr = T.block_k // 64
    dtype: gl.constexpr = descs.q.dtype
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_Q], dtype)
    if T.outputs.ds:  # as it is stored: queries x keys
        ds = gl.allocate_shared_memory(dtype, [4, 1, 1, BLOCK_Q, 64], descs.ds.layout)
    else:
        ds = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_Q], DS)
    queries = make_channel(T.pipeline.stages, 2, 1, T.singly)
    keys = make_channel(1, 2)
    # of lists each thread lets go by itself of what it was told, for racecheck follows no barrier from there; beside predicates
    # consumers would spill
    tickets = make_tickets(2, WORDS if T.tells else 1, (2 if T.outputs.copies_dq else 0) + T.outputs.ds, T.divided > 0)
    shares, sums, scores = ds, queries, queries
    if T.outputs.copies_dq:
        BOXES: gl.constexpr = 2 * T.columns_dq // T.columns_added
        shares = gl.allocate_shared_memory(gl.float32, [BOXES, 1, 1, T.columns_added // 4, 256], descs.sum.layout)
        sums = make_channel(2, 1, 1, False, T.singly)
    if T.outputs.sums_dq:
        scores = make_channel(2, 2, 2, T.singly, T.singly, T.outputs.ds)
    bias, biases = ds, queries
    if T.modifiers.early >= 0:
        bias = gl.allocate_shared_memory(descs.bias.dtype, [2, 1, 1, BLOCK_Q, 64], descs.bias.layout)
        biases = make_channel(1, 2, 1, T.singly)
    former, formers = ds, queries
    if T.outputs.pairs_ds:
        former = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_Q, 64], descs.ds.layout)
        formers = make_channel(2, 1)
    edges = queries
    if T.mask.blanks:
        edges = make_channel(2, 0)  # with one place ptxas keeps 18 words more of a document's loop in local memory
    part, parts = shares, queries
    if T.pipeline.converts:
        part = gl.allocate_shared_memory(gl.float32, [1, 1, T.columns_added // 4, 256], descs.sum.layout)
        parts = make_channel(1, 0)
    steps = ds
    if T.tells:
        steps = make_words(3 * T.told_steps)
    k = gl.allocate_shared_memory(dtype, [KEY_TILES, 1, 1, 64, T.columns], descs.k.layout)
    v = k
    if T.outputs.dk:
        v = gl.allocate_shared_memory(dtype, [KEY_TILES, 1, 1, 64, T.columns_v], descs.v.layout)
    return BackwardMemory(
        k,
        v,
        gl.allocate_shared_memory(dtype, [T.pipeline.stages, 1, 1, BLOCK_Q, T.columns], descs.q.layout),
        gl.allocate_shared_memory(dtype, [T.pipeline.stages_dout, 1, 1, BLOCK_Q, T.columns_v], descs.dout.layout),
        gl.allocate_shared_memory(gl.float32, [2 * T.pipeline.stages, 1, 1, 1, BLOCK_Q], descs.rows.layout),
        ds,
        shares,
        bias,
        former,
        part,
        steps,
        Channels(
            tickets,
            keys,
            queries,
            queries if T.pipeline.joined else make_channel(T.pipeline.stages_dout, 2, 1, T.singly),
            scores,
            sums,
            biases,
            formers,
            edges,
            parts,
        ),
    )
