"""A dump: a table of per-token log-probs with one row per sequence, written and read.

schema   the columns: names, types, trainers' names for them
writer   tensors → a folder of Parquet files
sources  paths, directories, globs and URLs → files
read     Parquet files → rows → batches
check    bad rows and signs
pack     rows → a batch of unmasked tokens
batch    the batch
long     one row per token → one row per sequence
forms    what trainers write by themselves
convert  any form → canonical Parquet; `open_dump`

Modules that read are imported on first use, so that the writer needs numpy and pyarrow alone.
"""
