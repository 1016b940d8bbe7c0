"""Which free block loses its cached content first.

Every free cached block has an owner: the salt of the requests that computed it. The block that was
given back longest ago goes first, but not at the expense of owners that have few: as long as even
that block is younger than `IDLE_SECONDS`, the owner with the most free blocks gives up its oldest
one. So a stream of new prompts pushes out its own past, and not what another user comes back to;
what nobody comes back to holds no share.

Adding, removing and choosing take constant time, however many owners there are.

Not here: what blocks contain (prefix.py), who holds them (blocks.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

IDLE_SECONDS = 300.0

Clock = Callable[[], float]


class FreeBlocks:
    """Free cached blocks in order of eviction. `clock` gives seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # block -> when it was given back, and whose it is; the oldest first
        self._all: OrderedDict[int, tuple[float, bytes]] = OrderedDict()
        self._owned: dict[bytes, OrderedDict[int, None]] = {}
        # number of blocks -> the owners that have so many
        self._sizes: dict[int, dict[bytes, None]] = {}
        self._largest = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __contains__(self, block: int) -> bool:
        return block in self._all

    def add(self, block: int, owner: bytes) -> None:
        """The block is free, as of now."""
        self._all[block] = self.clock(), owner
        owned = self._owned.setdefault(owner, OrderedDict())
        owned[block] = None
        self._resize(owner, len(owned) - 1, len(owned))

    def remove(self, block: int) -> None:
        """The block is in use again, or was never here."""
        found = self._all.pop(block, None)
        if found is None:
            return
        _, owner = found
        owned = self._owned[owner]
        del owned[block]
        self._resize(owner, len(owned) + 1, len(owned))
        if not owned:
            del self._owned[owner]

    def pop(self) -> int:
        """Take out the block that goes first; there is one."""
        block = next(iter(self._all))
        freed_at, _ = self._all[block]
        if self.clock() - freed_at < IDLE_SECONDS:
            owner = next(iter(self._sizes[self._largest]))
            block = next(iter(self._owned[owner]))
        self.remove(block)
        return block

    def clear(self) -> None:
        self._all.clear()
        self._owned.clear()
        self._sizes.clear()
        self._largest = 0

    def check(self) -> None:
        """Assert that all views agree."""
        assert sorted(self._all) == sorted(b for owned in self._owned.values() for b in owned)
        sizes = {owner: len(owned) for owner, owned in self._owned.items()}
        assert sizes == {o: n for n, owners in self._sizes.items() for o in owners}
        assert self._largest == max(sizes.values(), default=0)
        assert list(self._all.values()) == sorted(self._all.values(), key=lambda x: x[0])

    def _resize(self, owner: bytes, before: int, after: int) -> None:
        """An owner has one block more or one less."""
        if before:
            owners = self._sizes[before]
            del owners[owner]
            if not owners:
                del self._sizes[before]
        if after:
            self._sizes.setdefault(after, {})[owner] = None
        if after > self._largest or (before not in self._sizes and before == self._largest):
            self._largest = after
