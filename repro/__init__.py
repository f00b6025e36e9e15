"""A reproduction of PagedAttention (Kwon et al., SOSP 2023) that can be trusted, run and changed.

Importing the package imports nothing heavy: torch is reached only through `repro.llm` and `repro.kernels`.
"""

__version__ = "0.1.0"
