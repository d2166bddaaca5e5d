"""The core turns batches of packed tokens into numbers with intervals, by the same code on numpy and torch.

In the order in which one number passes through the modules:

    formulas        importance weight, divergences (K1, K2, K3, χ² …), M2PO's cut, policy losses
    segments        sums, means and extremes over sequences and turns, on arrays or tensors
    evaluate        weights, rules, vetoes, masks and losses of presets on a batch, each computed once
    sums            what a preset does to each sequence
    gap, tails      numbers of the gap between two policies, and of its largest ratios (Pareto k̂)
    preset_numbers  numbers of a preset
    places          axes: step, lag, turn, position …; histograms and charts: what pictures are drawn from
    kept_rows       the worst sequences, the diagnosis's sample, examples of what a preset drops
    state           sums by bucket of groups, which merge by adding, and the draws of the bootstrap
    intervals       a number's formula over sums, its 95% interval, differences of two numbers
    study, observe  what is measured of a dump, and the pass over it; whole_steps: the pass before it
    readout         every number of a result, read out once; breakdowns: those by place and by step
    sequences       a table with a row for each sequence (`--sequences`)
"""
