"""Context: over which ranks a sequence is sharded, how, and by which method they attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flashtile.errors import InvalidProblem
from flashtile.problem.dropout import GRAIN
from flashtile.problem.mask import Band, make_mask
from flashtile.torch.context.layout import LAYOUTS, Fetched, Stages, busiest, check_length, fetched, runs, sent_rows, stages

TWO_AXES = {"usp": "allgather", "usp_ring": "ring"}  # over a mesh of two axes: what runs over the first
MOST_GROUPS = 4  # of heads on a GPU: a quarter of the transport is then not hidden, and each further group costs launches
KEYS, TILES = 128, 512  # keys of a tile; tiles that fill the 132 processors of an H100 about four times. With 128 tiles of
# grouped heads a causal backward ends with its longest one: 16k tokens took 12.35 ms instead of 9.1 (two H200, 2026-11-29)
# Bytes of a group's keys on a CPU: a head of 1,024 keys, 64 columns, whose arithmetic is some 10 ms. Of 16 bits a call there
# holds float32 copies: with every head of k by itself 1.05 of the memory that is needed, with all together 2.05.
LARGE = 1 << 17
EVEN = 1.02  # times the mean of scores: on two H200 all-gather of equal work was 1.028 to 1.10 times as fast as Ulysses
METHODS = ("auto", "allgather", "ulysses", "ring", *TWO_AXES)


@dataclass(frozen=True)
class Context:
    """Over which ranks the sequence is sharded, and how they attend. A value: hashable, and nothing global.

    mesh: a `torch.distributed` process group, a DeviceMesh of one axis (`mesh["cp"]`), or None for the default group; for "usp"
        a DeviceMesh of two axes, whose ranks count row by row.
    method: "ulysses" exchanges heads for positions, each rank then attends its heads of the whole sequence; "allgather"
        gathers k and v, of a window its halo alone; "ring" passes k and v on from rank to rank, and merges partial results by
        lse: the least memory. "auto" takes the first that can do what is asked, in the order ulysses, allgather, ring;
        allgather comes first of a window that makes a halo small, and where it sends fewer bytes than ulysses and ranks' work
        is even. "usp" is ulysses over a mesh's second axis and allgather over its first, "usp_ring" ring over its first: for
        more ranks than heads, or hosts with slow links between them.
    layout: which positions a rank holds. "contiguous" runs one after another; "zigzag", a run of the first half and its
        mirror of the second, balances causal order (TransformerEngine's and torch's order); "striped" is every n-th position.
        "documents" is zigzag of each packed document by itself, for `attention_varlen` by "allgather".
    check: "always" lets ranks agree about every call before anything else is sent: arguments, shapes, options, and, on the CPU,
        what tensors hold that ranks have alike. "first" does so once for each kind of call and saves the host a round trip; a
        rank that then calls otherwise than the rest ends in torch's time-out.

    Raises InvalidProblem for a mesh, method or layout that is none. Where there is a group, its other ranks are told at their
    next call, and raise it, too: ranks make a Context alike.
    """

    mesh: Any = None
    method: Literal["auto", "allgather", "ulysses", "ring", "usp", "usp_ring"] = "auto"
    layout: Literal["contiguous", "zigzag", "striped", "documents"] = "contiguous"
    check: Literal["always", "first"] = "always"

    def __post_init__(self) -> None:
        import torch.distributed as dist

        from flashtile.torch.context.agree import refused_together

        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidProblem("context is made without a process group; call torch.distributed.init_process_group first.")
        if hasattr(self.mesh, "ndim"):
            axes = self.mesh.mesh_dim_names or self.mesh.ndim
            if self.method in TWO_AXES and not (self.mesh.ndim == 2 and self.mesh.mesh_dim_names):
                raise InvalidProblem(f"context mesh has the axes {axes}; for method {self.method!r} it must have two, by name.")
            if self.method not in TWO_AXES and self.mesh.ndim != 1:
                raise InvalidProblem(f'context mesh has the axes {axes}; it must have one, as mesh["cp"] has.')
        elif type(self.mesh) is type(_outside()) and self.mesh == _outside():
            raise InvalidProblem("context mesh is a process group that this rank is no member of.")
        elif not (self.mesh is None or isinstance(self.mesh, dist.ProcessGroup)):
            raise InvalidProblem(
                f"context mesh is {self.mesh!r}; it must be a DeviceMesh of one axis, a process group or None."
            )
        elif dist.get_rank(self.group) < 0:
            raise InvalidProblem("context mesh is a process group that this rank is no member of.")
        with refused_together(self):
            if self.method in TWO_AXES and not hasattr(self.mesh, "ndim"):
                raise InvalidProblem(f"context mesh is {self.mesh!r}; for method {self.method!r} it must be a DeviceMesh.")
            for name, known in (("method", METHODS), ("layout", LAYOUTS), ("check", ("always", "first"))):
                if getattr(self, name) not in known:
                    raise InvalidProblem(f"context {name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}.")
            if self.method in ("allgather", *TWO_AXES) and self.layout == "striped":
                raise InvalidProblem(
                    f"context method is {self.method!r} and layout 'striped'; it must be 'contiguous' or 'zigzag', which is as "
                    "balanced."
                )
            if self.layout == "documents" and self.method not in ("auto", "allgather"):
                raise InvalidProblem(
                    f"context method is {self.method!r} and layout 'documents'; it must be 'allgather', or the layout another."
                )

    @property
    def group(self) -> Any:
        """The process group."""
        import torch.distributed as dist

        if self.mesh is None:
            return dist.group.WORLD
        if self.method in TWO_AXES and hasattr(self.mesh, "ndim"):
            return self.mesh._flatten().get_group()  # torch keeps it
        return self.mesh.get_group() if hasattr(self.mesh, "get_group") else self.mesh

    @property
    def axes(self) -> tuple[Context, Context]:
        """Of a mesh of two axes: the ranks over which positions stay shared, and those that exchange heads."""
        first, second = (self.mesh.get_group(axis) for axis in (0, 1))
        over: Any = TWO_AXES[self.method]
        return Context(first, over, self.layout, self.check), Context(second, "ulysses", self.layout, self.check)

    @property
    def inner(self) -> int:
        """How many ranks exchange heads where a mesh has two axes; otherwise 1."""
        return self.mesh.size(1) if self.method in TWO_AXES else 1

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank()

    def explain(
        self, q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
        dropout: Any = None,
    ) -> str:  # fmt: skip
        """The method and why, what a rank sends by it and by the others, what of that is hidden behind attention, and how even
        work is, of these local shards, without masks of tensors, packed documents and seqused.

        q, k, v: tensors, or anything with their shape, dtype and device, such as meta tensors, which are taken for a GPU's.
        dropout: a `Dropout`, or None; its numbers are not read. Nothing is sent.
        """
        ranks, inner = self.ranks, self.inner
        outer, names = ranks // inner, (self.method,) if self.method in TWO_AXES else METHODS[1:4]
        seqlen_q, seqlen_k = q.shape[1] * ranks, k.shape[1] * ranks
        for name, seqlen in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
            check_length(self.layout, ranks, seqlen, f"the whole's {name}")
        heads = q.shape[2], k.shape[2]
        against = {name: refusals(name, self.layout, *heads, inner if name in TWO_AXES else ranks) for name in names}
        band = make_mask(causal, window, None)
        if dropout is not None:
            for name in names:
                lengths = seqlen_q, seqlen_k
                against[name] += against_dropout(name, self.layout, lengths, outer, q.device.type, False)
        seen = reach(band, dropout is not None)
        wanted = fetched(self.layout, (seqlen_q, seqlen_k), outer, seen) if self.layout != "striped" else ()
        halo = bool(wanted) and wanted[0].halo
        order, reason = candidates(self, q, k, v, band, dropout is not None, True)
        method = next(name for name in order if not against[name] or name == self.method)
        lines = [f"{method}, layout {self.layout}, {ranks} ranks of {q.shape[1]} of {seqlen_q} queries"]
        for name in names:
            over = TWO_AXES.get(name, name)
            forward, backward = sent_bytes(over, q, k, v, outer if name in TWO_AXES else ranks)
            of = ""
            if over == "allgather" and self.layout != "striped":  # as many numbers where heads are exchanged for positions
                forward, backward = (
                    halo_bytes(self.layout, q, k, v, wanted, inner)
                    if halo
                    else stage_bytes(stages(self.layout, (seqlen_q, seqlen_k), outer, seen), q, k, v, inner)
                )
                of = "the halo of its window alone: " if halo else ""
            if name in TWO_AXES:
                of_heads = sent_bytes("ulysses", q, k, v, inner)
                forward, backward = forward + of_heads[0], backward + of_heads[1]
            groups = (
                1 if name not in ("allgather", "ulysses") or (halo and name == "allgather") else head_groups(name, q, k, self)
            )
            under_way = ": all but one group's while others are computed" if q.device.type != "cpu" else ""
            hidden = f", in {groups} groups of heads{under_way}" if groups > 1 else ""
            hidden = ", all but the first step's while keys are computed" if over == "ring" and outer > 1 else hidden
            why = "; ".join(against[name]) or f"{of}a rank sends {forward:,} bytes forward, {backward:,} backward{hidden}"
            lines.append(f"{'*' if name == method else ' '} {name}: {why}")
        if reason:
            lines.append(f"  auto asks {order[0]} first: {reason}")
        share = 1.0 if method == "ulysses" else busiest(self.layout, (seqlen_q, seqlen_k), outer, band)
        lines.append(f"  the busiest rank has {share:.2f} times the mean of scores")
        return "\n".join(lines)


def _outside() -> Any:
    """What `torch.distributed.new_group` returns on ranks that are no members of the group."""
    import torch.distributed as dist

    return dist.GroupMember.NON_GROUP_MEMBER


def candidates(context: Context, q: Any, k: Any, v: Any, band: Band, dropped: bool, dense: bool) -> tuple[tuple[str, ...], str]:
    """(the methods in the order in which they are asked, why "auto" asks the first one first, if it had a choice).

    Bytes stand for time, because what travels is copied, too, and bound what "allgather" keeps.

    dense: that nothing but `band` hides keys, so that each rank's work is known without reading tensors.
    """
    if context.method != "auto":
        return (context.method,), ""
    gathered, by_heads = ("allgather", "ulysses", "ring"), ("ulysses", "allgather", "ring")
    if context.layout == "documents":  # whose keys are gathered
        return gathered, ""
    if context.layout == "striped":  # which cannot be
        return by_heads, ""
    ranks = context.ranks
    seqlens = q.shape[1] * ranks, k.shape[1] * ranks
    if fetched(context.layout, seqlens, ranks, reach(band, dropped))[0].halo:
        return gathered, "a window's halo is less than half of the others' keys"
    if not dense:
        return by_heads, "masks, documents and lengths may give ranks unequal work"
    sent, of_heads = (sum(sent_bytes(method, q, k, v, ranks)) for method in ("allgather", "ulysses"))
    if sent >= of_heads:
        return by_heads, f"allgather sends up to {sent:,} bytes in all, and ulysses {of_heads:,}"
    share = busiest(context.layout, seqlens, ranks, band)
    if share > EVEN:
        return by_heads, f"by allgather the busiest rank would have {share:.2f} times the mean of scores"
    return gathered, "it sends fewer bytes, and work is even; of masks, documents and seqused it would ask ulysses"


def reach(band: Band, dropped: bool) -> Band:
    """The band whose keys "allgather" fetches: beside dropout all keys of a window, because a halo's begin anywhere."""
    return Band(None, band.right) if dropped else band


def refusals(method: str, layout: str, heads_q: int, heads_kv: int, ranks: int) -> list[str]:
    """Why a method cannot serve these heads and this layout."""
    if method in ("allgather", *TWO_AXES) and layout == "striped":
        return ["layout is 'striped'; it gathers 'contiguous' or 'zigzag' alone"]
    if layout == "documents" and method != "allgather":
        return ["layout is 'documents', whose keys 'allgather' alone puts in order"]
    if method != "ulysses" and method not in TWO_AXES:
        return []
    reasons: list[str] = []
    if method in TWO_AXES and heads_kv % ranks:
        return [f"{heads_kv} heads of k over the {ranks} ranks of the mesh's second axis; they must be a multiple"]
    if heads_q % ranks:
        reasons.append(f"{heads_q} heads of q over {ranks} ranks; they must be a multiple")
    if heads_kv % ranks and ranks % heads_kv:
        reasons.append(f"{heads_kv} heads of k over {ranks} ranks; one must be a multiple of the other")
    return reasons


def against_dropout(method: str, layout: str, lengths: tuple[int, int], ranks: int, device: str, packed: bool) -> list[str]:
    """Why a method cannot drop by positions of the whole. lengths: of its queries and keys; device: a type; packed: whether
    positions are those in documents.
    """
    if method == "ulysses":
        return []
    if packed:
        return ["dropout of packed documents, which counts positions in each; method 'ulysses' does it"]
    if device == "cpu":
        return []
    if layout == "striped":
        return ["dropout in layout 'striped' on a GPU, whose kernels count positions one by one; 'zigzag' or 'ulysses' does it"]
    counted = lengths if "ring" in method else lengths[:1]  # keys of all ranks begin at 0
    begins = [run.start for length in counted for rank in range(ranks) for run in runs(layout, length, ranks, rank)]
    if any(begin % GRAIN for begin in begins):
        return [f"dropout on a GPU where ranks' positions do not begin at multiples of {GRAIN}; pad the sequence, or 'ulysses'"]
    return []


def head_groups(method: str, q: Any, k: Any, context: Context) -> int:
    """In how many groups of heads keys are gathered, or heads exchanged: a power of two that divides those of k that a rank
    attends; 1 where it would bring nothing.

    What is gathered, and its gradients, are then there for one group at a time. On a GPU a call of a group has at least TILES
    tiles of keys: a backward's programs walk one each, for all heads of q that share it. On a CPU it has at least LARGE bytes
    of keys.
    """
    if context.ranks == 1 or context.layout == "documents":  # its calls are short, and each group's ends with its longest tile
        return 1
    by_heads = method == "ulysses"
    share = context.ranks if by_heads else 1
    keys = k.shape[1] * share // (1 if context.layout == "contiguous" or by_heads else 2)  # of the shortest call
    size, least = k.shape[0] * k.shape[2] // share * (keys // KEYS), TILES
    if q.device.type == "cpu":
        size, least = k.numel() * k.element_size() * context.ranks // share, LARGE
    groups, most = 1, MOST_GROUPS if q.device.type != "cpu" else k.shape[2]
    while groups < most and k.shape[2] % (2 * groups * share) == 0 and size // (2 * groups) >= least:
        groups *= 2
    return groups


def halo_bytes(layout: str, q: Any, k: Any, v: Any, wanted: tuple[Fetched, ...], inner: int) -> tuple[int, int]:
    """(forward, backward): the bytes that the busiest rank sends by "allgather" where a window fetches its halo."""
    row = k.shape[0] * k.shape[2] // inner * (q.shape[-1] + v.shape[-1])
    sent, received = zip(*sent_rows(layout, k.shape[1] * inner * len(wanted), wanted), strict=True)
    return max(sent) * row * q.dtype.itemsize, max(received) * row * 4


def stage_bytes(plan: Stages, q: Any, k: Any, v: Any, inner: int) -> tuple[int, int]:
    """(forward, backward): the bytes that the busiest rank sends by "allgather": of keys that others' queries see."""
    ranks, row = range(len(plan.held)), k.shape[0] * k.shape[2] // inner * (q.shape[-1] + v.shape[-1])
    count = lambda places: sum(rows.stop - rows.start for rows, _ in places)  # noqa: E731
    keys, sums = (
        max(
            sum(count(places(stage, by, to)) for to in ranks if to != by for stage in range(len(plan.ends[by]))) for by in ranks
        )
        for places in (lambda stage, by, to: plan.news(stage, to, by), plan.news)
    )
    return keys * row * q.dtype.itemsize, sums * row * 4


def sent_bytes(method: str, q: Any, k: Any, v: Any, ranks: int) -> tuple[int, int]:
    """(forward, backward): the bytes that a rank sends. dk and dv of several parts travel in float32."""
    width = q.shape[-1] + v.shape[-1]
    keys, queries = k.shape[0] * k.shape[1] * k.shape[2] * width, q.shape[0] * q.shape[1] * q.shape[2] * width
    size = q.dtype.itemsize
    if method == "ulysses":
        copies = max(ranks // k.shape[2], 1)
        wire = 4 if copies > 1 else size
        away = (ranks - 1) / ranks
        return int((queries + keys * copies) * size * away), int((queries * size + keys * copies * wire) * away)
    if method == "allgather":
        return keys * size * (ranks - 1), keys * 4 * (ranks - 1)
    return keys * size * (ranks - 1), keys * (size * (ranks - 1) + 4 * ranks * (ranks > 1))
