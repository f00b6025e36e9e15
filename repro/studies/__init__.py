"""One module an experiment; its stem is also that of its notebook and its parameter file.

A study says what to compute, how to draw it and what it shows, in five names (`repro.studies.base` has what it is
written with, `common` what studies share):

    class Params(Parameters)                      the parameters of experiments/<stem>.yaml: types and bounds, no values
    TABLES                                        table -> the columns that tell its rows apart
    def points(params) -> list[Point]             the independent pieces of work
    def draw(rows, params) -> dict[str, Figure]   figure name -> figure, from the rows alone
    def judge(rows, params) -> list[Judgement]    what the rows say about the paper's claims; called only for a run with
                                                  the parameters of the file, but for those in `Params.free`

and, if it has tables for readers, `tables(rows, params)`. A point's function is defined at the top of the module and
returns one row or a list of rows. What is assumed, and why, stands at the head of the parameter file. Results are kept
by the content of the arguments and of the code that a point's function reaches, so editing `draw`, `judge` or what only
they use recomputes nothing. A study never reads a clock for anything but a measurement, and never writes a file.
docs/extending.md has an example."""
