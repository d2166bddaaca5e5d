"""From the tally of a dump to the Result: read out, saved, merged.

readout     tally → every number of the report
replicates  the values behind the intervals, and differences of two of them
sequences   one row per sequence, as Parquet
tally_file  the tally of one piece of a dump as a file
merge       many such files → one tally, and its Result
"""
