"""Which indices of a model's tensors move together: groups, and axes that are products of groups.

A group is a set of positions with one permutation. An axis is a list of groups, the outermost first: a flattened image
has [channels, rows, columns]. A group may be *over* others: it has one permutation for each of their indices, as the
dimensions of an attention's heads have one per head. What a model does with its tensors only ever narrows what may
move: groups are united, fixed, split into products, or collapsed to one permutation for all that they are over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


class Group:
    """Positions that move by one permutation, or by one per index of the groups that it is over."""

    def __init__(self, size: int, name: str, over: tuple[Group, ...] = (), fixed: bool = False) -> None:
        self.size, self.name, self.over, self.fixed = size, name, over, fixed
        self.same: Group | None = None  # it was united with that one
        self.parts: list[Group] | None = None  # it is a product of these, the outermost first
        self.slots: dict[int, Group] = {}  # by index of the first group that it is over: its permutations there
        self.joint: Joint | None = None


Axis = list[Group]


class Joint:
    """A group whose positions several axes share, as long as nothing treats these axes apart: a model's input."""

    def __init__(self, whole: Group, parts: Axis) -> None:
        self.whole, self.parts = whole, parts
        for part in parts:
            part.joint = self

    def break_up(self) -> None:
        """From now on, every axis moves by itself."""
        for part in self.parts:
            part.joint = None
        whole = find(self.whole)
        if self.parts == [self.whole]:
            return
        if whole.parts is None and not whole.fixed:
            whole.parts = self.parts
        else:
            unite([whole], self.parts)


def fixed(size: int, name: str = "fixed") -> Axis:
    """An axis whose positions stay in place."""
    return [Group(size, name, fixed=True)] if size > 1 else []


def free(size: int, name: str) -> Axis:
    """An axis that may move in any way, so far."""
    return [Group(size, name)] if size > 1 else []


def find(group: Group) -> Group:
    """What stands for a group after it was united with others."""
    while group.same is not None:
        group = group.same
    return group


def spread(axis: Iterable[Group]) -> Axis:
    """An axis in the groups that there are now."""
    found: Axis = []
    for group in map(find, axis):
        found += [group] if group.parts is None else spread(group.parts)
    return found


def length(axis: Iterable[Group]) -> int:
    return prod(group.size for group in axis)


def touch(axis: Iterable[Group]) -> Axis:
    """The axis, which something now treats apart from the others."""
    for group in spread(axis):
        if group.joint is not None:
            group.joint.break_up()
    return spread(axis)


def fix(axis: Iterable[Group]) -> None:
    """Nothing of this axis may move."""
    for group in touch(axis):
        group.fixed = True
        for slot in group.slots.values():
            fix([slot])


def split(group: Group, outer: int, kept_apart: bool = True) -> Axis:
    """The group as a product of `outer` and what is left; with `kept_apart`, the inner one moves per outer index."""
    (group,) = touch([group])
    made = Group(outer, f"{group.name}/{outer}", group.over, group.fixed)
    over = (*group.over, made) if kept_apart and not group.fixed else group.over
    rest = Group(group.size // outer, f"{group.name}%{outer}", over, group.fixed)
    for index, slot in group.slots.items():
        made.slots[index], rest.slots[index] = _halves(slot, outer, kept_apart)
    group.parts = [made, rest]
    return group.parts


def _halves(slot: Group, outer: int, kept_apart: bool) -> Axis:
    """A slot as a product of `outer` and the rest; it may be a product already."""
    parts = spread([slot])
    if len(parts) == 1:
        return split(parts[0], outer, kept_apart)
    if parts[0].size != outer:
        fix(parts)
        return [Group(outer, "fixed", fixed=True), Group(slot.size // outer, "fixed", fixed=True)]
    rest = Group(slot.size // outer, f"{slot.name}%{outer}")
    rest.parts = parts[1:]
    return [parts[0], rest]


def collapse(group: Group) -> None:
    """One permutation for all indices of the groups that it is over."""
    slots, group.over, group.slots = group.slots, (), {}
    for slot in slots.values():
        unite([group], [slot])


def unite(one: Iterable[Group], other: Iterable[Group]) -> None:
    """The two axes, of one length, move alike. Where their products cannot be matched, neither moves."""
    left, right = spread(one), spread(other)
    whole = [*left, *right]
    while left and right:
        a, b = find(left[0]), find(right[0])
        if a is b:
            left, right = left[1:], right[1:]
        elif a.parts is not None or b.parts is not None:
            left, right = spread(left), spread(right)
        elif a.size == b.size:
            _unite(a, b)
            left, right = left[1:], right[1:]
        else:
            small, large = sorted((a, b), key=lambda group: group.size)
            if large.size % small.size:
                fix(whole)
                return
            split(large, small.size)
            left, right = spread(left), spread(right)


def _unite(a: Group, b: Group) -> None:
    touch([a, b])
    if spread(a.over) != spread(b.over):
        collapse(a)
        collapse(b)
        a, b = find(a), find(b)
        if a is b or a.parts is not None or b.parts is not None:
            unite([a], [b])
            return
    b.same = a
    if a.fixed or b.fixed:
        fix([a])
        fix(b.slots.values())
    for index, slot in b.slots.items():
        if index in a.slots:
            unite([a.slots[index]], [slot])
        else:
            a.slots[index] = slot


def depends(group: Group, on: Sequence[Group]) -> bool:
    """Whether a group moves per index of any of these."""
    return any(outer in on for outer in spread(group.over))


def dropped(axes: Iterable[Axis], gone: Axis) -> None:
    """An axis was summed over or read at one place: what moved per index of it moves for all of them alike now."""
    outer = touch(gone)
    for group in [group for axis in axes for group in spread(axis)]:
        if depends(find(group), outer):
            collapse(find(group))


def selected(axes: Sequence[Axis], gone: Axis, index: int) -> list[Axis]:
    """What the other axes are where an axis, which then cannot move, has this index."""
    fix(gone)
    outer = spread(gone)
    if len(outer) != 1:
        dropped(axes, outer)
        return [spread(axis) for axis in axes]
    return [[_slot(group, outer[0], index) for group in spread(axis)] for axis in axes]


def _slot(group: Group, outer: Group, index: int) -> Group:
    over = spread(group.over)
    if outer not in over:
        return group
    if over[0] is not outer:
        collapse(group)
        return find(group)
    if index not in group.slots:
        rest = tuple(_slot(each, outer, index) for each in over[1:])
        group.slots[index] = Group(group.size, f"{group.name}[{index}]", rest, group.fixed)
    return find(group.slots[index])


def reshaped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """The axes of a tensor in another shape, in row-major order."""
    left = [group for axis in axes for group in spread(axis)]
    everything, made = list(left), list[Axis]()
    for size in shape:
        axis: Axis = []
        while length(axis) < size:
            group, wanted = left[0], size // length(axis)
            if size % length(axis) or (wanted < group.size and group.size % wanted):
                fix(everything)
                return [fixed(n) for n in shape]
            if wanted < group.size:
                left[:1] = split(group, wanted)
                continue
            if wanted % group.size:
                fix(everything)
                return [fixed(n) for n in shape]
            axis.append(left.pop(0))
        made.append(_joined(axis))
    return made


def _joined(axis: Axis) -> Axis:
    """With the parts of an input that are all there, in order, as one."""
    for start, group in enumerate(axis):
        joint = group.joint
        if joint is not None and axis[start : start + len(joint.parts)] == joint.parts:
            return [*axis[:start], joint.whole, *_joined(axis[start + len(joint.parts) :])]
    return axis


def side_by_side(axes: Sequence[Axis]) -> Axis:
    """Axes of one length, one after the other: each keeps its own order."""
    size = length(axes[0])
    if len(axes) == 1 or size == 1:
        return axes[0] if len(axes) == 1 else fixed(len(axes))
    (outer,) = fixed(len(axes), "side by side")
    inner = Group(size, "of each", (outer,))
    for index, axis in enumerate(map(touch, axes)):
        inner.slots[index] = Group(size, f"of {index}")
        inner.slots[index].parts = axis
    return [outer, inner]


def broadcast(one: Sequence[Axis], other: Sequence[Axis]) -> list[Axis]:
    """The axes of a result where those of two operands are aligned at their ends and united."""
    long, short = (one, other) if len(one) >= len(other) else (other, one)
    made = list(long)
    for place, axis in enumerate(short, start=len(long) - len(short)):
        if not long[place]:
            made[place] = axis
        elif axis:
            unite(long[place], axis)
    return made


def settle(axes: Sequence[Axis]) -> list[Axis]:
    """The axes in groups that can be drawn: each slot is one group, and what a group is over is in the same axis."""
    while True:
        found = [spread(axis) for axis in axes]
        if not any(_settled(group, axis) for axis in found for group in axis):
            return found


def _settled(group: Group, axis: Axis) -> bool:
    """Settle one thing about a group of this axis, if there is any to settle."""
    if find(group) is not group or group.parts is not None:
        return True
    if any(outer not in axis for outer in spread(group.over)):
        collapse(group)
        return True
    for slot in group.slots.values():
        parts = spread([slot])
        if len(parts) > 1:
            split(group, parts[0].size)
            return True
        if rows(parts[0]) not in (1, per_slot(group)):
            collapse(parts[0])
            return True
    return False


def rows(group: Group) -> int:
    """How many permutations a group has."""
    return length(spread(group.over))


def per_slot(group: Group) -> int:
    """How many of them are at one index of the first group that it is over."""
    return rows(group) // length(spread(group.over[:1]))
