"""Block pool and prefix cache.

A block is `block_size` positions of KV, known here only by its id; the arrays belong to the
backend. Every KV group has a pool of its own and a sequence has one block table per group. In a
group with a window, blocks that no later token can see are given back while the sequence runs.

A freed block keeps its content hash until it is handed out again: the list of free cached blocks is
the cache, in eviction order. Blocks of one sequence are freed from the last to the first, so that
leaves go before the prefixes they hang on; and of two blocks with the same content one is kept, so
that a prefix is always in use when what hangs on it is.

Invariants (see `BlockPool.check`):
  1. every id is exactly one of: referenced, blank, or free and still cached;
  2. a cached block's content never changes while it is cached;
  3. the free cached blocks are in eviction order (eviction.py);
  4. an entry of the prefix index is held by at least one group, and by one block of it.

Not here: which sequence deserves blocks (scheduler.py), what hashes mean (prefix.py).
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from localllm.engine.eviction import Clock, FreeBlocks
from localllm.engine.missing import why_missed
from localllm.engine.prefix import (
    BlockHash,
    Entry,
    PrefixIndex,
    Start,
    block_hash,
    prompt_keys,
    root,
    text_hash,
)
from localllm.engine.sequence import Sequence
from localllm.errors import OutOfBlocks

RESERVE = 2  # blocks a running sequence that are left when another is let in

CopyBlock = Callable[[int, int, int, int], None]


class GroupPool:
    """The blocks of one KV group: reference counts, free blocks, and which hash a block holds."""

    def __init__(
        self,
        num_blocks: int,
        window: int | None,
        evicted: Callable[[BlockHash], None],
        clock: Clock,
    ) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self.evicted = evicted
        self.references = [0] * num_blocks
        # A stack: used blocks are used again first, so fresh memory stays untouched.
        self.blank = list(range(num_blocks - 1, -1, -1))
        self.cached_free = FreeBlocks(clock)
        self.hash_of: dict[int, BlockHash] = {}
        self.owner_of: dict[int, bytes] = {}
        self.block_of: dict[BlockHash, int] = {}

    @property
    def num_available(self) -> int:
        return len(self.blank) + len(self.cached_free)

    def take(self, n: int) -> list[int]:
        """Hand out `n` blocks, evicting cached ones when no blank ones are left.

        Raises OutOfBlocks, and hands out nothing, if fewer than `n` are available.
        """
        if n > self.num_available:
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_available} available")
        taken = []
        for _ in range(n):
            block = self.blank.pop() if self.blank else self._evict()
            self.references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One more reference to a block that is referenced or cached."""
        self.cached_free.remove(block)
        self.references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; the first ones are evicted first."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block]:
                continue
            if block in self.hash_of:
                self.cached_free.add(block, self.owner_of[block])
            else:
                self.blank.append(block)

    def name(self, block: int, content: BlockHash, owner: bytes) -> bool:
        """Cache the block under its hash; False if the group has that content already."""
        if content in self.block_of or block in self.hash_of:
            return False
        self.hash_of[block] = content
        self.owner_of[block] = owner
        self.block_of[content] = block
        return True

    def forget(self) -> None:
        """Uncache everything."""
        self.blank.extend(reversed(list(self.cached_free)))
        self.cached_free.clear()
        self.hash_of.clear()
        self.owner_of.clear()
        self.block_of.clear()

    def _evict(self) -> int:
        block = self.cached_free.pop()
        content = self.hash_of.pop(block)
        del self.owner_of[block]
        del self.block_of[content]
        self.evicted(content)
        return block

    def check(self) -> None:
        """Invariants 1 and 4 within the group."""
        self.cached_free.check()
        referenced = {b for b, n in enumerate(self.references) if n}
        blank, cached = set(self.blank), set(self.cached_free)
        assert min(self.references, default=0) >= 0
        assert len(blank) == len(self.blank)
        assert referenced.isdisjoint(blank)
        assert referenced.isdisjoint(cached)
        assert blank.isdisjoint(cached)
        assert len(referenced) + len(blank) + len(cached) == self.num_blocks
        assert cached <= set(self.hash_of) == set(self.owner_of)
        assert not blank & set(self.hash_of)
        assert {h: b for b, h in self.hash_of.items()} == self.block_of


class BlockPool:
    """All groups together: what the scheduler asks for, in sequences and positions.

    copy_block   (group, source, target, num_positions), done at once by the backend
    identity     what the KV depends on beside the tokens: model digest, KV type, adapters
    clock        seconds; it tells blocks that are idle for long from those that are not
    num_given_back   counts releases, so that a caller can tell whether asking again makes sense
    """

    def __init__(
        self,
        num_blocks: SequenceOf[int],
        windows: SequenceOf[int | None],
        block_size: int,
        copy_block: CopyBlock,
        identity: bytes = b"",
        clock: Clock = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.copy_block = copy_block
        self.identity = identity
        self.index = PrefixIndex(block_size)
        self.holders: Counter[BlockHash] = Counter()
        self.groups = [GroupPool(n, w, self._evicted, clock) for n, w in zip(num_blocks, windows)]
        self.num_given_back = 0

    def capacity(self) -> int:
        """Positions that one sequence alone can have."""
        full = [g.num_blocks for g in self.groups if g.window is None]
        small = [
            g.num_blocks
            for g in self.groups
            if g.window is not None and g.num_blocks < g.window // self.block_size + 3
        ]
        return min((*full, *small), default=2**31 // self.block_size) * self.block_size

    def usage(self) -> float:
        """Share of the blocks that are referenced, in the fullest group."""
        return max(1 - g.num_available / g.num_blocks for g in self.groups)

    def fill(self, positions: Iterable[tuple[Sequence, int]]) -> float:
        """Share of all positions of the pool that hold a token, in the fullest group.

        positions   every sequence that holds blocks, and how many of its positions have one
        """
        size = self.block_size
        filled: list[dict[int, int]] = [{} for _ in self.groups]
        for sequence, count in positions:
            for held, table, known in zip(sequence.first_held, sequence.tables, filled):
                for i in range(held, len(table)):
                    known[table[i]] = max(known.get(table[i], 0), min(size, count - i * size))
        return max(sum(f.values()) / (g.num_blocks * size) for g, f in zip(self.groups, filled))

    def keys_of(self, sequence: Sequence) -> list[bytes]:
        """What the full blocks of its prompt are known by; found once, from any thread."""
        if sequence.keys is None:
            request, size = sequence.request, self.block_size
            # The last token is always computed.
            count = min(sequence.num_prompt, sequence.num_tokens - 1) if request.cache_prompt else 0
            tokens = sequence.tokens[:count]
            sequence.keys = prompt_keys(
                self.identity, request.salt, tokens, size, exact=request.exact
            )
        return sequence.keys

    def cached_depth(self, sequence: Sequence) -> int:
        """Full blocks of its prompt that are cached by now, as far as the index tells."""
        keys, exact = self.keys_of(sequence), sequence.request.exact
        sequence.cached_depth = self.index.num_known(keys, sequence.cached_depth, exact=exact)
        return sequence.cached_depth

    def admit(self, sequence: Sequence, chunk: int, num_running: int = 0) -> bool:
        """Give the sequence its longest cached prefix, if what it lacks is available too.

        chunk         most tokens that it will compute in one step (a window needs room for them)
        num_running   those that want more blocks soon; some are left for them
        Returns False, and changes nothing, if the pool cannot hold all its known tokens.
        """
        self._start(sequence)
        if sequence.request.cache_prompt:
            miss = self._take_prefix(sequence)
        else:
            miss = "cache off"
        if not sequence.was_admitted:
            sequence.prefix_miss = miss
        if all(
            self._wanted(g, sequence.num_tokens, chunk)
            - len(table)
            + held
            + reserve(g, num_running)
            <= g.num_available
            for g, table, held in zip(self.groups, sequence.tables, sequence.first_held)
        ):
            return True
        self._drop(sequence)
        return False

    def room(self, sequence: Sequence) -> int:
        """Tokens the sequence could compute next with the blocks it has and those available."""
        blocks = min(len(t) + g.num_available for g, t in zip(self.groups, sequence.tables))
        return blocks * self.block_size - sequence.num_computed

    def spare(self, sequence: Sequence, num_kept: int) -> int:
        """Positions after its known tokens that it can have if `num_kept` blocks stay available."""
        fresh = min(g.num_available for g in self.groups) - num_kept
        blocks = len(sequence.tables[0]) + max(0, fresh)
        return blocks * self.block_size - sequence.num_tokens

    def grow(self, sequence: Sequence, num_positions: int) -> None:
        """Extend the tables to `num_positions`. Raises OutOfBlocks, and changes nothing."""
        lacking = -(-num_positions // self.block_size) - len(sequence.tables[0])
        if lacking <= 0:
            return
        if any(g.num_available < lacking for g in self.groups):
            raise OutOfBlocks(f"{lacking} blocks wanted for {sequence.request.request_id}")
        for group, table in zip(self.groups, sequence.tables):
            table.extend(group.take(lacking))

    def commit(self, sequence: Sequence) -> None:
        """After a step: cache the blocks that became full, give back those behind a window."""
        if sequence.request.cache_prompt:
            size = self.block_size
            while (sequence.num_published + 1) * size <= sequence.num_computed:
                self._publish(sequence, size)
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = max(0, sequence.num_computed - group.window + 1) // self.block_size
            held = sequence.first_held[g]
            if first > held:
                group.give_back(sequence.tables[g][held:first])
                sequence.first_held[g] = first
                self.num_given_back += 1

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; what was computed stays cached, the last partial block too."""
        tail = sequence.num_computed - sequence.num_published * self.block_size
        if sequence.request.cache_prompt and sequence.tables and tail > 0:
            self._publish(sequence, tail)
        self._drop(sequence)
        sequence.num_computed = 0
        self.num_given_back += 1

    def forget(self) -> None:
        """Empty the cache: contents are not to be trusted any more."""
        for group in self.groups:
            group.forget()
        self.holders.clear()
        self.index = PrefixIndex(self.block_size)

    def check(self, sequences: Iterable[Sequence] = ()) -> None:
        """Assert the invariants; `sequences` are all those that hold blocks."""
        for group in self.groups:
            group.check()
        assert set(self.index.entries) == {h for h, n in self.holders.items() if n}
        held = Counter(h for group in self.groups for h in group.block_of)
        assert held == +self.holders
        counts = [Counter[int]() for _ in self.groups]
        for sequence in sequences:
            for g, table in enumerate(sequence.tables):
                counts[g].update(table[sequence.first_held[g] :])
        for group, count in zip(self.groups, counts):
            assert {b: n for b, n in enumerate(group.references) if n} == dict(count)

    def _start(self, sequence: Sequence) -> None:
        sequence.tables = [array("i") for _ in self.groups]
        sequence.first_held = [0] * len(self.groups)
        sequence.num_computed = sequence.num_published = 0
        sequence.chain, sequence.text_chain = root(self.identity, sequence.request.salt)

    def _drop(self, sequence: Sequence) -> None:
        for group, table, held in zip(self.groups, sequence.tables, sequence.first_held):
            group.give_back(reversed(table[held:]))
        sequence.tables, sequence.first_held = [], []
        sequence.num_computed = 0

    def _wanted(self, group: GroupPool, num_tokens: int, chunk: int) -> int:
        """Blocks of the group that a sequence of `num_tokens` holds at its worst moment."""
        positions = num_tokens if group.window is None else min(num_tokens, group.window + chunk)
        spare = group.window is not None and positions < num_tokens
        return min(-(-positions // self.block_size) + spare, group.num_blocks)

    def _num_prompt_in(self, sequence: Sequence, block: int, num_tokens: int) -> int:
        return max(0, min(num_tokens, sequence.num_prompt - block * self.block_size))

    def _take_prefix(self, sequence: Sequence) -> str:
        """Share the full blocks of the longest prefix that every group still has, copy the next.

        Returns why that is not all, as in `Stats.prefix_miss`.
        """
        loose = not sequence.request.exact and sequence.emitted == 0
        path = self._walk(sequence, loose=loose)
        depth = self._usable([entry for entry, _ in path])
        for g, group in enumerate(self.groups):
            first = self._first_seen(group, depth * self.block_size)
            sequence.tables[g].extend([0] * first)
            sequence.first_held[g] = first
            for entry, _ in path[first:depth]:
                block = group.block_of[entry.hash]
                group.share(block)
                sequence.tables[g].append(block)
        if depth:
            last, sequence.chain = path[depth - 1]
            sequence.text_chain = last.text
        sequence.num_published = depth
        sequence.num_computed = depth * self.block_size
        start = self._copy_start(sequence, loose=loose)
        return why_missed(self.index, sequence, start, is_incomplete=len(path) > depth)

    def _walk(self, sequence: Sequence, *, loose: bool) -> list[tuple[Entry, BlockHash]]:
        """Cached full blocks from the first token on, each with the chain that goes on from it."""
        size = self.block_size
        path: list[tuple[Entry, BlockHash]] = []
        chain, text = sequence.chain, sequence.text_chain
        # The last known token is always computed: its logits start the answer.
        for i in range((sequence.num_tokens - 1) // size):
            tokens = sequence.tokens[i * size : (i + 1) * size]
            num_prompt = self._num_prompt_in(sequence, i, size)
            found = self.index.next_block(chain, text, tokens, num_prompt, loose=loose)
            if found is None:
                break
            path.append(found)
            chain, text = found[1], found[0].text
        return path

    def _usable(self, entries: list[Entry]) -> int:
        """The longest prefix of `entries` for which every group has what the next token sees."""
        runs = [0] * len(self.groups)
        alive = [True] * len(self.groups)
        best = 0
        for depth, entry in enumerate(entries, start=1):
            fits = True
            for g, group in enumerate(self.groups):
                runs[g] = runs[g] + 1 if entry.hash in group.block_of else 0
                if group.window is None:
                    alive[g] &= runs[g] == depth
                    fits &= alive[g]
                else:
                    fits &= runs[g] >= depth - self._first_seen(group, depth * self.block_size)
            if fits:
                best = depth
        return best

    def _first_seen(self, group: GroupPool, position: int) -> int:
        """The first block that a token at `position` can see."""
        if group.window is None:
            return 0
        return max(0, position - group.window + 1) // self.block_size

    def _copy_start(self, sequence: Sequence, *, loose: bool) -> Start | None:
        """Copy the first positions of a cached block that begins as the sequence goes on."""
        size, first = self.block_size, sequence.num_computed
        tokens = sequence.tokens[first : min(first + size, sequence.num_tokens - 1)]
        num_prompt = self._num_prompt_in(sequence, sequence.num_published, size)
        start = self.index.longest_start(
            sequence.chain, sequence.text_chain, tokens, num_prompt, loose=loose
        )
        if start is None or not self._is_copyable(start):
            return None
        for g, (group, table) in enumerate(zip(self.groups, sequence.tables)):
            source = group.block_of[start.entry.hash]
            group.share(source)
            (target,) = group.take(1)
            self.copy_block(g, source, target, start.num_tokens)
            group.give_back([source])
            table.append(target)
        sequence.chain = start.chain
        sequence.num_computed += start.num_tokens
        return start

    def _is_copyable(self, start: Start) -> bool:
        """Every group has the source, and a target beside it."""
        for group in self.groups:
            source = group.block_of.get(start.entry.hash)
            if source is None or group.num_available - (not group.references[source]) < 1:
                return False
        return True

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the sequence's next block, of which `num_tokens` are computed."""
        i = sequence.num_published
        tokens = sequence.tokens[i * self.block_size : i * self.block_size + num_tokens]
        num_prompt = self._num_prompt_in(sequence, i, num_tokens)
        entry = Entry(
            hash=block_hash(sequence.chain, tokens, num_prompt),
            parent=sequence.chain,
            text=text_hash(sequence.text_chain, tokens),
            text_parent=sequence.text_chain,
            tokens=tuple(tokens),
            num_prompt=num_prompt,
        )
        owner = sequence.request.salt
        named = [g.name(t[i], entry.hash, owner) for g, t in zip(self.groups, sequence.tables)]
        if any(named):
            self.holders[entry.hash] += sum(named)
            self.index.add(entry)
        if not all(named):
            self._share_twins(sequence, i, entry.hash)
        sequence.chain, sequence.text_chain = entry.hash, entry.text
        sequence.num_published += 1

    def _share_twins(self, sequence: Sequence, i: int, content: BlockHash) -> None:
        """Give the sequence's `i`-th blocks back for those that had the same content before."""
        # New tables: whoever has copied the old ones must see that they are others.
        sequence.tables = [array("i", table) for table in sequence.tables]
        for group, table in zip(self.groups, sequence.tables):
            twin = group.block_of[content]
            if twin != table[i]:
                group.share(twin)
                group.give_back([table[i]])
                table[i] = twin
        self.num_given_back += 1

    def _evicted(self, content: BlockHash) -> None:
        self.holders[content] -= 1
        if not self.holders[content]:
            del self.holders[content]
            self.index.remove(content)


def reserve(group: GroupPool, num_running: int) -> int:
    """Blocks to leave for those that run: to compute a sequence again costs more than to wait.

    Behind a window a sequence holds all it will ever hold.
    """
    if group.window is not None:
        return 0
    return min(RESERVE * num_running, group.num_blocks // 32 * 2)
