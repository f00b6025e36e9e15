"""What `make oracle` (oracle.py) is made of: published code is fetched, read and driven, and never kept here.

fetch       a wheel from the package index, unpacked into a cache and imported without what it would need to run
same        two sides of a comparison, equal but for the names of their blocks
rules2023   what vLLM 0.1.7 decides otherwise, each as a setting on top of our scheduler
trials      random operations and random runs, given to both sides
paged2023   vLLM 0.1.7 as one of the sides
v1          the scheduler of vLLM V1, beside our chunked prefill
"""
