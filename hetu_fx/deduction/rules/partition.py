"""Union-find over factors with refinement: what the whole graph says about which dims are the same.

A factor is a number. It is either an atom, or was refined into an ordered product of other factors; `atoms`
gives what it stands for now. Two lists of factors that describe the same dim are unified from both ends,
which is exact for mixed radices: the outermost digit of the finer list is the outermost part of the coarser
one's first digit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from hetu_fx.deduction.rules.size import ONE, Size


class Partition:
    """A growing set of factors and what is known of them; created empty, owned by one analysis."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._sizes: list[Size] = []
        self._parts: list[tuple[int, ...] | None] = []

    def new(self, size: Size) -> int:
        """Add an atom of the given size and return its number."""
        self._parent.append(len(self._parent))
        self._sizes.append(size)
        self._parts.append(None)
        return len(self._parent) - 1

    def size(self, factor: int) -> Size:
        """Return the size of a factor."""
        return self._sizes[self._find(factor)]

    def atoms(self, factors: Iterable[int]) -> tuple[int, ...]:
        """Return the atoms that the factors stand for, outermost first."""
        result: list[int] = []
        for factor in factors:
            root = self._find(factor)
            parts = self._parts[root]
            if parts is None:
                result.append(root)
            else:
                flat = self.atoms(parts)
                self._parts[root] = flat
                result.extend(flat)
        return tuple(result)

    def unify(self, left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
        """Make two lists of factors of one dim the same, outermost first; return the factors of both that are left."""
        if len(left) == len(right) == 1 and self._unify_atoms(left[0], right[0]):
            return ()
        a, b = deque(self.atoms(left)), deque(self.atoms(right))
        self._match(a, b, from_left=True)
        self._match(a, b, from_left=False)
        if len(a) == len(b) == 1 and self._unify_hints(a[0], b[0]):
            return ()
        return (*a, *b)

    def _find(self, factor: int) -> int:
        parent = self._parent
        while parent[factor] != factor:
            parent[factor] = parent[parent[factor]]
            factor = parent[factor]
        return factor

    def _unify_atoms(self, a: int, b: int) -> bool:
        a, b = self._find(a), self._find(b)
        if a == b:
            return True
        if self._parts[a] is not None or self._parts[b] is not None or self._sizes[a] != self._sizes[b]:
            return False
        self._union(a, b)
        return True

    def _union(self, a: int, b: int) -> None:
        first, second = sorted((a, b))
        self._parent[second] = first

    def _unify_hints(self, a: int, b: int) -> bool:
        # Two symbols that an op requires to be equal (labels and logits, say) have the same hint; a fixed
        # size beside a symbol stays the size.
        sizes = (self._sizes[a], self._sizes[b])
        if sizes[0].hint != sizes[1].hint or not sizes[0].hint:
            return False
        self._union(a, b)
        for size in sizes:
            if size.number is not None:
                self._sizes[self._find(a)] = size
        return True

    def _match(self, a: deque[int], b: deque[int], *, from_left: bool) -> None:
        while a and b:
            x, y = self._end(a, from_left), self._end(b, from_left)
            if x != y and not self._agree(x, y, from_left):
                return
            self._drop(a, from_left)
            self._drop(b, from_left)

    def _end(self, queue: deque[int], from_left: bool) -> int:
        """Return the atom at the end, after putting in its place what it was refined into meanwhile."""
        factor = queue[0] if from_left else queue[-1]
        atoms = self.atoms((factor,))
        if atoms != (factor,):
            self._pop(queue, from_left)
            (queue.extendleft(reversed(atoms)) if from_left else queue.extend(atoms))
        return queue[0] if from_left else queue[-1]

    def _agree(self, x: int, y: int, from_left: bool) -> bool:
        """Union atoms of equal size, or refine the bigger by the smaller; tell whether it worked."""
        if self._sizes[x] == self._sizes[y]:
            self._union(x, y)
            return True
        return self._refine(x, y, from_left) or self._refine(y, x, from_left)

    def _refine(self, big: int, small: int, from_left: bool) -> bool:
        rest = self._sizes[big].over(self._sizes[small])
        if rest is None or rest == ONE or self._sizes[small] == ONE:
            return False
        other = self.new(rest)
        self._parts[big] = (small, other) if from_left else (other, small)
        return True

    def _drop(self, queue: deque[int], from_left: bool) -> None:
        """Take one matched atom off the end: all of the factor, or the part of it that was matched."""
        self._end(queue, from_left)
        self._pop(queue, from_left)

    @staticmethod
    def _pop(queue: deque[int], from_left: bool) -> int:
        return queue.popleft() if from_left else queue.pop()
