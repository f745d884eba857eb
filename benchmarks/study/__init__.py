"""The study: what each objective teaches an encoder, at equal compute, on phantoms with known truth and on real fluid.

`make study` makes one cohort, runs every entry of `plan`, keeps each result as its run ends (`results`), and writes the
page of `page` from the results alone. A repeated call goes on where the last one stopped, within a run too.
"""
