"""What a function of scalars does, such as FlexAttention's `score_mod` and `mask_mod`: recorded, and evaluated as torch does.

The function is called once, with 0-dimensional tensors, and every operator that runs meanwhile is recorded below autograd, so
that nothing which makes a tensor goes unseen. What asks for a value, draws random numbers or changes a tensor of
the caller's is refused by name. A recorded value is evaluated by `torch.vmap` over those of its axes that it depends on: it is
what torch makes of it, reductions, products and gathers included, and captured tensors receive their gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flashtile.errors import InvalidProblem, NotSupported

AXES: tuple[str, ...] = ("batch", "head", "q_idx", "kv_idx")
INPUTS: tuple[str, ...] = ("score", *AXES)
ATEN = torch.ops.aten

_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_GATHERS = ("index", "index_put")  # whose shape depends on values where an index is boolean
_VALUES = {
    "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "tolist",
    "__float__", "__index__", "__int__", "__complex__",
}  # fmt: skip
# What makes a tensor of numbers in lists, those of tensors too, which no operator then says.
_COPIES = ("tensor", "new_tensor", "as_tensor", "asarray", "new", "__getitem__", "__setitem__")
_CASTS = {
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "short", "char", "byte", "bool",
}  # fmt: skip


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """The arguments of an operator, with each of them replaced; torch's own trees take ten times as long."""
    if type(value) in (tuple, list):
        return type(value)([each(function, v) for v in value])
    return {k: each(function, v) for k, v in value.items()} if type(value) is dict else function(value)


def leaves_of(value: Any) -> list[Any]:
    """The arguments of an operator, one by one."""
    if type(value) is dict:
        value = list(value.values())
    return [leaf for v in value for leaf in leaves_of(v)] if type(value) in (tuple, list) else [value]


@dataclass(frozen=True, eq=False)
class Node:
    """A value that a call of an operator made; its arguments are nodes, captured tensors and plain values."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: frozenset[str]  # the INPUTS that it depends on
    serial: float  # rises in the order in which values are made
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    detached: bool = False  # made where no gradient was to be recorded

    @property
    def parents(self) -> list[Node]:
        return [leaf for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, Node)]

    @property
    def name(self) -> str:
        space, _, rest = str(self.op).partition(".")
        return rest.partition(".")[0] if space == "aten" else str(self.op).removesuffix(".default")


INPUT = "input"  # the `op` of a node that is one of INPUTS; its only argument is the name
LITERAL = "literal"  # the `op` of a node that is a 0-dimensional tensor of a known number; its only argument is that


@dataclass
class Recorded:
    """The result of a function with what went by on the way."""

    result: Node
    captured: tuple[torch.Tensor, ...]  # what it read of the caller's
    by_value: bool = False  # whether it went by numbers in a captured tensor


class Recorder(TorchDispatchMode):
    """Notes of every tensor that is made while it is active which operator made it of what."""

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject
        self.made: dict[int, tuple[torch.Tensor, Node]] = {}  # with the tensor, so that its id stays its own
        self.spoilt: set[int] = set()  # ids of tensors that were changed by way of another view of them
        self.captured: dict[int, torch.Tensor] = {}
        self.wrapped: dict[int, torch.Tensor] = {}  # by the id of a tensor that torch.func wraps what stands for it
        self.stands: dict[int, torch.Tensor] = {}  # and by that one's id the wrapped one
        self.unknown: set[int] = set()  # ids of those that torch.vmap maps: no number stands for theirs
        self.by_value = False
        self.count = 0

    def refusal(self, reason: str) -> NotSupported:
        return refusal(self.subject, reason)

    def note(self, tensor: torch.Tensor, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], detached: bool) -> Node:
        needs = frozenset[str]().union(*(n.needs for n in leaves_of((args, kwargs)) if isinstance(n, Node)))
        self.count += 1
        node = Node(op, args, kwargs, needs, self.count, tuple(tensor.shape), tensor.dtype, detached)
        self.made[id(tensor)] = tensor, node
        return node

    def input(self, name: str, tensor: torch.Tensor) -> Node:
        node = Node(INPUT, (name,), {}, frozenset({name}), 0, (), tensor.dtype)
        self.made[id(tensor)] = tensor, node
        return node

    def seen(self, value: Any) -> Any:
        """Node, captured tensor or plain value that an argument stands for."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self.spoilt:
            raise self.refusal("it reads a tensor after it changed another view of it in place")
        if id(value) in self.made and id(value) not in self.stands:
            return self.made[id(value)][1]
        value = self.stands.get(id(value), value)
        self.captured[id(value)] = value
        return value

    def plain(self, value: Any) -> Any:
        """What stands, while the function is recorded, for a tensor that a transform of torch.func has wrapped."""
        if not isinstance(value, torch.Tensor) or not _functorch.is_functorch_wrapped_tensor(value):
            return value
        if id(value) not in self.wrapped:
            inner = value
            while _functorch.is_gradtrackingtensor(inner):
                inner = _functorch.get_unwrapped(inner)
            with _unseen():
                if _functorch.is_functorch_wrapped_tensor(inner):
                    stand = torch.ones(value.shape, dtype=value.dtype, device=value.device)
                    self.unknown.add(id(value))
                else:
                    stand = inner.detach().clone()
            self.wrapped[id(value)], self.stands[id(stand)] = stand, value
        return self.wrapped[id(value)]

    def reads(self, values: Any) -> None:
        """Note that numbers of these are read, which torch.vmap must not have of what it maps."""
        self.by_value = True
        seen = [self.seen(value) for value in leaves_of(values)]
        for node in ancestors([node for node in seen if isinstance(node, Node)]):
            seen += leaves_of((node.args, node.kwargs))
        if any(id(tensor) in self.unknown for tensor in seen):
            raise self.refusal("it asks for a value of a tensor that torch.vmap maps, as torch does not allow")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, detached = kwargs or {}, not torch.is_grad_enabled()
        if func is ATEN.lift_fresh.default:
            return self.lift(args[0])
        name = func._schema.name.partition("::")[2].partition(".")[0]
        seen_args, seen_kwargs = each(self.seen, args), each(self.seen, kwargs)
        needs = any(isinstance(n, Node) and n.needs for n in leaves_of((seen_args, seen_kwargs)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refusal(f"it draws random numbers ({name})")
        if needs and name not in _GATHERS and not {*func.tags}.isdisjoint(_BY_VALUE):
            what = "item" if name == "_local_scalar_dense" else name
            raise self.refusal(f"it asks for a value ({what}), which differs from score to score")
        boolean = [i for i in seen_args[1] if _is_boolean(i)] if name in _GATHERS else []
        if needs and any(isinstance(i, Node) for i in boolean):
            raise self.refusal("it indexes a tensor by a boolean, which differs from score to score")
        if boolean or (name not in _GATHERS and not {*func.tags}.isdisjoint(_BY_VALUE)):
            self.reads(boolean or [seen_args, seen_kwargs])
        if func._schema.is_mutable:
            return self.change(func, name, args, kwargs, (seen_args, seen_kwargs), detached)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.note(result, func, _merged(func, seen_args), seen_kwargs, detached)
        elif isinstance(result, (tuple, list)) and any(isinstance(r, torch.Tensor) for r in result):
            self.count += 1
            leaves = [n.needs for n in leaves_of((seen_args, seen_kwargs)) if isinstance(n, Node)]
            whole = Node(func, seen_args, seen_kwargs, frozenset[str]().union(*leaves), self.count)
            for i, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    self.note(part, operator.getitem, (whole, i), {}, detached)
        return result

    def lift(self, fresh: torch.Tensor) -> torch.Tensor:
        """A tensor that torch.tensor(...) makes: one number is a literal."""
        if fresh.dim() == 0 and fresh.device.type == "cpu" and id(fresh) not in self.made:
            self.count += 1
            self.made[id(fresh)] = fresh, Node(LITERAL, (fresh.item(),), {}, frozenset(), self.count, (), fresh.dtype)
        return fresh

    def copies(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note numbers that are read of tensors in lists; those that differ from score to score are refused."""
        given = [*args, *kwargs.values()]
        if name in ("__getitem__", "__setitem__"):
            given = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        elif name in ("tensor", "new_tensor"):
            self.by_value |= any(isinstance(one, torch.Tensor) for one in (*args[-1:], *kwargs.values()))
        listed = leaves_of([one for one in given if isinstance(one, (list, tuple))])
        for tensor in [t for t in listed if isinstance(t, torch.Tensor)]:
            self.reads([tensor])
            if id(tensor) in self.made and self.made[id(tensor)][1].needs:
                what = "indexes by" if name.startswith("__") else "makes a tensor of"
                raise self.refusal(f"it {what} a list of values, which differ from score to score (torch.stack keeps them)")

    def change(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], seen: tuple[Any, Any], detached: bool
    ) -> Any:
        """An operator in place, recorded as what it is out of place."""
        target = args[0] if args else None
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        plain = getattr(ATEN, name.removesuffix("_"), None) if name.endswith("_") and not name.endswith("__") else None
        if written != ["self"] or plain is None or func._overloadname not in plain.overloads():
            raise self.refusal(f"it writes to a tensor ({name})")
        if not isinstance(target, torch.Tensor) or id(target) not in self.made:
            raise self.refusal(f"it changes a captured tensor in place ({name})")
        place = target.untyped_storage()._cdata
        if any(t.untyped_storage()._cdata == place for t in self.captured.values()):
            raise self.refusal(f"it changes a captured tensor in place ({name})")
        dtype = target.dtype
        result = func(*args, **kwargs)
        for key, (tensor, _) in self.made.items():
            if key != id(target) and tensor.untyped_storage()._cdata == place:
                self.spoilt.add(key)
        made = self.note(target, getattr(plain, func._overloadname), *seen, detached)
        self.note(target, ATEN._to_copy.default, (made,), {"dtype": dtype}, detached)
        return result


class _Scalars(TorchFunctionMode):
    """Indexing as FlexAttention has it, and what no operator says: dtypes as they are shown, and views of the memory."""

    def __init__(self, recorder: Recorder, shown: Mapping[str, torch.dtype], transformed: bool) -> None:
        super().__init__()
        self.recorder, self.shown = recorder, shown
        self.transformed = transformed

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, made = kwargs or {}, self.recorder.made
        if self.transformed:
            args, kwargs = each(self.recorder.plain, args), each(self.recorder.plain, kwargs)
        name = getattr(func, "__name__", "")
        recorded = bool(args) and isinstance(args[0], torch.Tensor) and id(args[0]) in made
        if name in _COPIES:
            self.recorder.copies(name, args, kwargs)
        if name in _VALUES:
            self.recorder.reads(args)
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, torch.Tensor) for i in leaves_of(index)):
                return _indexed(args[0], index, func)
        elif name == "one_hot" and recorded:  # which looks at the values first
            return _one_hot(*args, **kwargs) if made[id(args[0])][1].needs else func(*args, **kwargs)
        elif name == "__get__" and recorded:
            if func.__self__ is torch.Tensor.dtype:
                return _shown(made[id(args[0])][1], self.shown)
        elif recorded and made[id(args[0])][1].needs and name in _VALUES:
            raise self.recorder.refusal(f"it asks for a value ({name.strip('_')}), which differs from score to score")
        elif recorded and name in _CASTS:
            result = func(*args, **kwargs)
            if result is args[0]:  # of another dtype than is shown: the conversion is said all the same
                return ATEN._to_copy.default(result, dtype=result.dtype)
            return result
        return func(*args, **kwargs)


def _indexed(tensor: torch.Tensor, index: tuple[Any, ...], otherwise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """tensor[index] where some of the index are tensors: elements, without asking for their places."""
    if all(isinstance(i, (torch.Tensor, int)) for i in index):
        place = tensor.device
        return ATEN.index.Tensor(
            tensor, [i if isinstance(i, torch.Tensor) else torch.full((), i, dtype=torch.int64, device=place) for i in index]
        )
    if any(isinstance(i, torch.Tensor) and (i.dim() or i.dtype in (torch.bool, torch.uint8)) for i in index) or not all(
        i is None or i is Ellipsis or isinstance(i, (torch.Tensor, int, slice)) for i in index
    ):  # fmt: skip
        return otherwise(tensor, index)
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        missing = tensor.dim() - sum(i is not None and i is not Ellipsis for i in index)
        index = (*index[:at], *(slice(None),) * missing, *index[at + 1 :])
    plain = tensor[tuple(slice(None) if isinstance(i, torch.Tensor) else i for i in index)]
    kept = [i for i in index if not isinstance(i, int)]  # an integer leaves no axis
    return ATEN.index.Tensor(plain, [i if isinstance(i, torch.Tensor) else None for i in kept])


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 0:
        raise NotSupported("one_hot", {"flashtile": ["num_classes is not given, and values differ from score to score"]})
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _shown(node: Node, shown: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype that torch shows of a value: it calls the function with a score of q's dtype and int32 indices first."""
    if node.op != INPUT and not node.needs and node.dtype is not None:
        return node.dtype
    meta = {name: torch.zeros((), dtype=shown[name], device="meta") for name in node.needs}
    with _unseen():
        value = evaluate([node], meta, lambda t: t.to("meta"), "meta")[0]
    return value.dtype


@contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _merged(func: Any, args: Any) -> Any:
    """An element of an element, as one: t[i][j] is t[i, j]."""
    if func is ATEN.index.Tensor and isinstance(args[0], Node) and args[0].op is func:
        first, second = args[0].args[1], args[1]
        if all(i is not None and _dims(i) == 0 for i in (*first, *second)):
            return args[0].args[0], [*first, *second]
    return args


def _is_boolean(index: Any) -> bool:
    return isinstance(index, (Node, torch.Tensor)) and index.dtype in (torch.bool, torch.uint8)


def _dims(value: Any) -> int:
    return len(value.shape)


def refusal(subject: str, reason: str) -> NotSupported:
    """The error for a function that nothing here can read."""
    own = "a modifier" if subject == "score_mod" else "a Predicate"
    how = f"use flashtile.attention with {own} of your own if need be"
    return NotSupported(f"flex_attention with this {subject}", {"flashtile": [f"{reason}; {how}"]})


def record(
    function: Callable[..., Any], subject: str, device: torch.device, names: Sequence[str], shown: torch.dtype = torch.float32
) -> Recorded:
    """What `function` does, called with one 0-dimensional tensor for each of `names`, of INPUTS.

    subject: "score_mod" or "mask_mod". shown: the dtype that `score.dtype` is; the score itself is float32, the indices int64.
    Raises NotSupported for what cannot be read, InvalidProblem for a result that is no scalar.
    """
    recorder, transformed = Recorder(subject), _functorch.maybe_current_level() is not None
    dtypes = {name: shown if name == "score" else torch.int32 for name in names}
    # torch.func's transforms are left meanwhile: they would wrap what is made here
    with plainly(device), temporarily_clear_interpreter_stack(), torch.enable_grad():
        given = {n: torch.zeros((), dtype=torch.float32 if n == "score" else torch.int64, device=device) for n in names}
        if "score" in given:
            given["score"] = given["score"].requires_grad_() + 0  # no leaf, which may not be changed in place
        for name, tensor in given.items():
            recorder.input(name, tensor)
        with recorder, _Scalars(recorder, dtypes, transformed):
            result = function(*given.values())
    if not isinstance(result, torch.Tensor):
        raise InvalidProblem(f"{subject} returns a {type(result).__name__}; it must return a tensor of no dimensions.")
    if result.dim():
        raise InvalidProblem(f"{subject} returns the shape {tuple(result.shape)}; it must return a tensor of no dimensions.")
    node = recorder.seen(result)
    if isinstance(node, torch.Tensor):  # a captured one, as it is
        node = Node(ATEN.alias.default, (node,), {}, frozenset(), 0, (), node.dtype)
    captured = recorder.captured.values()
    own = _custom_gradient(result, {id(t.grad_fn) for t in captured if t.grad_fn is not None})
    if own is not None:
        raise recorder.refusal(f"it has a gradient of its own, {own} (torch.autograd.Function), which cannot be read")
    return Recorded(node, tuple(captured), recorder.by_value)


def _custom_gradient(result: torch.Tensor, known: set[int]) -> str | None:
    """The name of a torch.autograd.Function between the inputs and the result, beyond the tensors that were captured."""
    waiting, met = [result.grad_fn], set(known)
    while waiting:
        step = waiting.pop()
        if step is None or id(step) in met:
            continue
        met.add(id(step))
        if isinstance(step, torch.autograd.function.BackwardCFunction):
            return type(step).__name__.removesuffix("Backward")
        waiting += [before for before, _ in step.next_functions]
    return None


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Without autocast, as torch calls these functions."""
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def taken(node: Node, subject: str) -> Iterator[None]:
    """What torch.vmap does not take is refused by name; an index beyond its tensor is an error."""
    try:
        yield
    except IndexError as error:
        raise InvalidProblem(f"{subject} indexes beyond a tensor ({error}); it must stay within.") from error
    except (RuntimeError, NotImplementedError) as error:
        raise refusal(subject, f"torch.vmap does not take it ({node.name}): {str(error).splitlines()[0][:200]}") from error


def ancestors(roots: Sequence[Node], stop: Callable[[Node], bool] = lambda _: False) -> list[Node]:
    """The nodes that roots are made of, themselves included, in the order in which they were made; none beyond `stop`."""
    found: dict[int, Node] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found[id(node)] = node
            waiting += [] if stop(node) else node.parents
    return sorted(found.values(), key=lambda node: node.serial)


def evaluate(
    roots: Sequence[Node], inputs: Mapping[str, torch.Tensor], captured: Callable[[torch.Tensor], torch.Tensor], device: Any,
    known: Mapping[int, Any] | None = None,
) -> list[Any]:  # fmt: skip
    """The values of nodes, given those of the inputs, and by id of nodes that are `known`."""
    values: dict[int, Any] = dict(known or {})

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[id(argument)]
        if isinstance(argument, torch.Tensor):
            return captured(argument)
        return torch.device(device) if isinstance(argument, torch.device) else argument

    for node in ancestors(roots, lambda node: id(node) in values):
        if id(node) in values:
            continue
        if node.op == INPUT:
            values[id(node)] = inputs[node.args[0]]
        elif node.op == LITERAL:
            values[id(node)] = torch.full((), node.args[0], dtype=node.dtype, device=device)
        else:
            made = node.op(*each(value, node.args), **each(value, node.kwargs))
            values[id(node)] = made.detach() if node.detached and isinstance(made, torch.Tensor) else made
    return [values[id(root)] for root in roots]
