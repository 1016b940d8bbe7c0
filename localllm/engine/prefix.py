"""What the cached blocks contain: the index that finds a request's longest known prefix.

A block's hash names the exact bits of its content: it chains the parent's hash with the block's
tokens and with how many of them were computed as prompt (the role decides the arithmetic). So a
preempted sequence finds its own blocks again, and a prefix is *exact* when it was prompt from the
first token on. Beside it runs a second chain over the tokens alone; with it a request that does not
insist on exactness finds blocks that were written while generating. Its own chain is then marked as
derived from that block, so that a hash never promises bits it does not have.

Both chains start from a root that holds the model's digest, the KV type and the caller's salt.

The index also remembers for a while which texts it had, so that a miss can be explained.

Not here: block ids, reference counts, eviction (blocks.py).
Source: hash-chained blocks as in vLLM's v1 block pool; the roles are ours.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NewType, TypeVar

BlockHash = NewType("BlockHash", bytes)
TextHash = NewType("TextHash", bytes)
K = TypeVar("K")

HASH_BYTES = 16
MAX_CANDIDATES = 16  # branches of one prefix that are compared token by token
MAX_EVICTED = 8192  # evicted blocks that are remembered


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one cached block; it may lie in the pools of several KV groups.

    tokens      the block's tokens; fewer than the block size: a tail, good for copying only
    num_prompt  how many of them, from the first, were computed as prompt
    """

    hash: BlockHash
    parent: BlockHash
    text: TextHash
    text_parent: TextHash
    tokens: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Start:
    """First positions of a cached block that a sequence may copy, and its chain then."""

    entry: Entry
    num_tokens: int
    chain: BlockHash


def root(identity: bytes, salt: bytes) -> tuple[BlockHash, TextHash]:
    """The hashes before the first block: `identity` is the model, its KV type and adapters."""
    content = len(identity).to_bytes(8, "little") + identity + salt
    block = blake2b(content, digest_size=HASH_BYTES, person=b"root")
    text = blake2b(content, digest_size=HASH_BYTES, person=b"text root")
    return BlockHash(block.digest()), TextHash(text.digest())


def prompt_keys(
    identity: bytes, salt: bytes, tokens: list[int], block_size: int, *, exact: bool
) -> list[bytes]:
    """What the full blocks of a prompt are known by in a `PrefixIndex`, each with all before it."""
    chain, text = root(identity, salt)
    keys: list[bytes] = []
    for i in range(block_size, len(tokens) + 1, block_size):
        block = tokens[i - block_size : i]
        if exact:
            chain = block_hash(chain, block, block_size)
        else:
            text = text_hash(text, block)
        keys.append(chain if exact else text)
    return keys


def block_hash(parent: BlockHash, tokens: Iterable[int], num_prompt: int) -> BlockHash:
    content = parent + array("i", tokens).tobytes() + num_prompt.to_bytes(4, "little")
    return BlockHash(blake2b(content, digest_size=HASH_BYTES, person=b"roles").digest())


def text_hash(parent: TextHash, tokens: Iterable[int]) -> TextHash:
    content = parent + array("i", tokens).tobytes()
    return TextHash(blake2b(content, digest_size=HASH_BYTES, person=b"text").digest())


def derived_hash(chain: BlockHash, donor: BlockHash) -> BlockHash:
    """The chain of a sequence that goes on from a block of another chain."""
    return BlockHash(blake2b(chain + donor, digest_size=HASH_BYTES, person=b"derived").digest())


class PrefixIndex:
    """Entries by hash, by tokens, and by parent."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.entries: dict[BlockHash, Entry] = {}
        self.by_text: dict[TextHash, dict[BlockHash, None]] = {}
        self.children: dict[tuple[bytes, int], dict[BlockHash, None]] = {}
        self.num_next: Counter[TextHash] = Counter()
        self.evicted: OrderedDict[TextHash, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """Make the entry known; the most recent of equal text is found first."""
        self.entries[entry.hash] = entry
        self.by_text.setdefault(entry.text, {})[entry.hash] = None
        for key in self._parents(entry):
            self.children.setdefault(key, {})[entry.hash] = None
        self.num_next[entry.text_parent] += 1
        self.evicted.pop(entry.text, None)

    def num_known(self, keys: list[bytes], first: int, *, exact: bool) -> int:
        """How many of `prompt_keys` are known, where the first `first` were when last asked."""
        known: Container[bytes] = self.entries if exact else self.by_text
        # Blocks are evicted leaf first: if the last one is there, so are those before it.
        count = first if first and keys[first - 1] in known else 0
        while count < len(keys) and keys[count] in known:
            count += 1
        return count

    def remove(self, block: BlockHash) -> None:
        """Forget the entry: no group holds its block any more."""
        entry = self.entries.pop(block)
        drop(self.by_text, entry.text, block)
        for key in self._parents(entry):
            drop(self.children, key, block)
        self.num_next[entry.text_parent] -= 1
        if not self.num_next[entry.text_parent]:
            del self.num_next[entry.text_parent]
        if len(entry.tokens) == self.block_size:
            self.evicted[entry.text] = None
            if len(self.evicted) > MAX_EVICTED:
                self.evicted.popitem(last=False)

    def next_block(
        self,
        chain: BlockHash,
        text_chain: TextHash,
        tokens: list[int],
        num_prompt: int,
        *,
        loose: bool,
    ) -> tuple[Entry, BlockHash] | None:
        """The cached block with these tokens after this prefix, and the chain that goes on from it.

        loose   also accept blocks whose tokens were computed in other roles
        """
        exact = self.entries.get(block_hash(chain, tokens, num_prompt))
        if exact is not None:
            return exact, exact.hash
        if loose:
            for block in reversed(self.by_text.get(text_hash(text_chain, tokens), {})):
                return self.entries[block], derived_hash(chain, block)
        return None

    def longest_start(
        self,
        chain: BlockHash,
        text_chain: TextHash,
        tokens: list[int],
        num_prompt: int,
        *,
        loose: bool,
    ) -> Start | None:
        """The cached block that begins with most of `tokens`, in the same roles if it can be."""
        if not tokens:
            return None
        best: Start | None = None
        for entry in self._candidates(chain, tokens[0]):
            common = num_common(entry.tokens, tokens)
            if entry.num_prompt != num_prompt:
                common = min(common, entry.num_prompt, num_prompt)
            if common > (best.num_tokens if best else 0):
                best = Start(entry, common, chain)
        if loose:
            for entry in self._candidates(text_chain, tokens[0]):
                common = num_common(entry.tokens, tokens)
                if common > (best.num_tokens if best else 0):
                    best = Start(entry, common, derived_hash(chain, entry.hash))
        return best

    def _candidates(self, parent: bytes, first_token: int) -> list[Entry]:
        known = self.children.get((parent, first_token), {})
        recent = zip(range(MAX_CANDIDATES), reversed(known))
        return [self.entries[block] for _, block in recent]

    def _parents(self, entry: Entry) -> tuple[tuple[bytes, int], tuple[bytes, int]]:
        first = entry.tokens[0]
        return (entry.parent, first), (entry.text_parent, first)


def num_common(a: tuple[int, ...], b: list[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


def drop(table: dict[K, dict[BlockHash, None]], key: K, block: BlockHash) -> None:
    members = table[key]
    del members[block]
    if not members:
        del table[key]
