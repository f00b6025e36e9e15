"""Experiments: what a study states is computed, kept, drawn, judged and checked here. No study is known by name.

parameters   a parameter file, and a study's typed parameters
experiment   an experiment as a notebook sees it: open it, compute its rows, draw them, judge them
tables       the rows: named tables with keys, one CSV file each
keys         what a result depends on, as one hash; `sources` finds the code that a function reaches
store        one small file for each finished point; locks
workers      computes points in processes; `progress` shows how far they are
card         a run as it displays in a notebook
new          makes an experiment from a template
notebook     executes an experiment's notebook
runs         reads what was kept of runs; `diff` compares two of them, `verify` checks figures"""
