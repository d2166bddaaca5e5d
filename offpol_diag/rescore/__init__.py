"""Score the responses of a dump again with the run's model, and say which side computes something else.

rows        a dump → responses with their prompts
score       responses → log-probs under a model of transformers
models      a folder or a hub id → the model, its adapter and other checkpoints
variants    hypotheses: a change of the model, of the inputs or of the head, and what it would mean
verdict     which hypothesis a column is: each column by itself, of all tokens, by place and by prompt
command     the passes over the model, the verdict, and the dump with what was computed beside its columns
"""
