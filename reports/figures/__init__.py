"""The charts, one a file: the numbers in it, how they come from the records, and how they are drawn.

`x_info` is pure and holds every number and word that is shown; `x_figure` only draws, with plotly.
"""
