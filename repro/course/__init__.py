"""What the course's notebooks are graded with (notebooks/course). Standard library and engine only.

    toy              the engine at toy size: what a lesson shows before its task
    shadow           the shadow store: is each token where its block table says?
    grading          traces, the smallest one that fails, and what a check says
    waste            lesson 1: reserved slots, and those that hold a token (§3.1)
    block_tables     lesson 2: where a token lies, and when a block is added (§4.2, §4.3)
    copy_on_write    lesson 3: reference counts, and the order of copies (§4.4)
    preemption       lesson 4: who is driven out, and what it keeps (§4.5)
    batching         lesson 5: iterations, token budgets, prompts in parts
    prefix_caching   lesson 6: blocks found by what they hold

Each lesson has a check for each of its tasks. A check gets what the student wrote, and returns a `Grade`."""
