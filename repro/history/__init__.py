"""What a run was: how to run it again, and its memory over time. Standard library only.

recipe       all that a run's decisions follow from, so that it can be run again
recorded     the recipe of a run whose executor is not at hand, by what was decided
watching     an observer that watches one run from its beginning
memory_map   an observer that keeps who holds which block, from iteration to iteration
tables       block tables as changes and keyframes
happenings   who starts, is driven out, returns, ends and waits
rent         who pays for the pool: slots x time
sentences    what a scheduler decided, in words
map_page     a map, or two, as a page of its own
pages        templates of this room, filled in"""
