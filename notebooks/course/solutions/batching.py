"""Solution of lesson 5."""


def next_batch(decodes: list[int], prompts: list[tuple[int, int]], budget: int) -> dict[int, int]:
    batch = dict.fromkeys(decodes, 1)
    budget -= len(decodes)
    for request, left in prompts:
        batch[request] = min(left, budget)
        budget -= batch[request]
    return batch


def chunk_end(start: int, total: int, budget: int) -> int:
    return min(total, start + budget)
