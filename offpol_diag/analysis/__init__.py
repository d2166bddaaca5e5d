"""From the tally of a dump to the Result.

readout     tally → every number of the report
replicates  the values behind the intervals, and differences of two of them
sequences   one row per sequence, as Parquet
"""
