"""One module per experiment; its stem is also that of its notebook and its parameter file.

A study says what to compute, how to draw it and what it shows (`repro.studies.base` has what it is written with):

    class Params                                  the parameters of experiments/<stem>.yaml: types and bounds
    TABLES                                        table -> the columns that tell its rows apart
    def points(params) -> list[Point]             the independent pieces of work
    def draw(rows, params) -> dict[str, Figure]   figure name -> figure, from the rows alone
    def judge(rows, params) -> list[Judgement]    what the rows say about the paper's claims

What is assumed, and why, stands at the head of the parameter file. Results are kept by the content of the arguments and
of the code that a point's function reaches, so editing `draw`, `judge` or what only they use recomputes nothing. A
study never reads a clock for anything but a measurement, and never writes a file.
"""
