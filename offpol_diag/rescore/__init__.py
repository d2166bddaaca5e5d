"""Score the responses of a dump again with the run's model, and say which side computes something else.

rows        a dump → responses with their prompts
score       responses → log-probs under a model of transformers
models      a folder or a hub id → the model, its adapter and other checkpoints
variants    hypotheses: a change of the model, of the inputs or of the head, and what it would mean
verdict     which column is whose: each by itself against every hypothesis, by group, then the five outcomes
run         the passes over the model, kept where they are interrupted
dump        the dump with what was computed beside its columns
"""
