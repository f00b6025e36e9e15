"""Solution of lesson 6."""

import hashlib


def hashes_of(tokens: list[int], block_size: int) -> list[bytes]:
    hashes, before = [], b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        before = hashlib.sha256(before + str(block).encode()).digest()  # chained: equal hashes are equal prefixes
        hashes.append(before)
    return hashes


def find(contents, found: dict, num_tokens: int, block_size: int) -> list[int]:
    blocks = []
    for content in contents[: (num_tokens - 1) // block_size]:  # the last token is computed in any case
        if content not in found:
            break
        blocks.append(found[content])
    return blocks


def can_start(needed: int, found: list[int], ref_counts: list[int], num_free: int) -> bool:
    revived = sum(not ref_counts[block] for block in found)
    return needed + revived <= num_free
