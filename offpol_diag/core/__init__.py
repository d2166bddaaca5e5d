"""The core: from batches of packed tokens to numbers with intervals, one text for numpy and for torch.

In the order in which one number passes through them:

    formulas        importance weight, divergences (K1, K2, K3, χ² …), M2PO's cut, policy losses
    segments        sums, means and extremes of sequences and turns, on arrays or tensors
    evaluate        weights, rules, veto, masks and losses of the tokens of a batch, each computed once
    sums            what a preset does to each sequence
    gap, tails      the numbers of two policies; those of the largest ratios, with Pareto k̂
    preset_numbers  the numbers of a preset
    places          steps, lags, turns, positions …; histograms, charts: bins and what pictures show
    kept_rows       the worst tokens and sequences, and the sample of the diagnosis
    state           sums by bucket of groups, which merge by adding; the draws of the bootstrap
    intervals       a number's formula over sums; its 95% interval; differences of two numbers
    study, observe  what is measured of a dump, and the pass over it; whole_steps: the one before
    readout         every number of a result, once; breakdowns: those at places and by step
    sequences       a table of sequences, a row each
"""
