"""From the tally of a dump to the Result.

readout     tally → every number of the report
sequences   one row per sequence, as Parquet
"""
