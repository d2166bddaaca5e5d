"""From the accumulated states of a dump to the Summary: read out, saved, merged.

readout     states → every number of the report
replicates  the values behind the intervals, and differences of two of them
sequences   one row per sequence, as Parquet
tally_file  the states of one piece of a dump as a file, read without trust
merge       many such files → one tally, and its Summary
"""
