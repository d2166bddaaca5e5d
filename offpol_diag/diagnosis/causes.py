"""Table of the causes of a mismatch: the sentence, the violated identity, how to confirm it, how to fix it.

The signature that found the cause fills in the fields in braces (`Found.fields`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One cause.

    Attributes:
        kind: bug if the logged numbers or the engine are wrong, honest if the policies really differ.
        sentence: what is wrong, in a clause that follows "Bug:" or "Honest mismatch:".
        violates: the identity or fact that the numbers contradict.
        confirm: how to confirm the cause.
        fix: what to change, with the keys of engines and trainers if there are any.
        after: the repair that the numbers after the fix assume.
        ruled_out: the phrase that reports the cause as ruled out; empty if it cannot be.
    """

    kind: Literal["bug", "honest"]
    sentence: str
    violates: str
    confirm: str
    fix: str
    after: str = ""
    ruled_out: str = ""


CAUSES: dict[str, Row] = {
    "sentinel": Row(
        "bug",
        "{share} of the {column} log-probs are the constant {value}, which stands for a missing value",
        "log-probs of sampled tokens vary; one value does not come again and again",
        "look at these tokens in what the {side} returns: a missing log-prob is filled in with {value} on "
        "the way",
        "keep such tokens out of the loss (response_mask 0), and find where they get lost: streamed chunks, "
        "aborted and resumed requests, tokens the engine did not sample",
        "with these tokens masked",
        "constants in place of log-probs",
    ),
    "copied_mean": Row(
        "bug",
        "the {column} column holds one value for each sequence, copied to all of its tokens",
        "no two log-probs of a response are equal",
        "print one sequence of the {column} column as the {side} returns it, before anything is averaged",
        "write the log-prob of each sampled token: no mean over the sequence (a masked mean, or "
        "cumulative_logprob / length) before it",
    ),
    "top1_logged": Row(
        "bug",
        "the {column} column holds the log-prob of the likeliest token, not of the sampled one",
        "the log-prob of a sampled token is often below that of the likeliest one",
        "print the dict of log-probs that the {side} returns for one token: the entry of the sampled id is "
        "not always the first",
        "take the entry of the sampled id, not the first (vLLM: logprobs[token_id].logprob)",
        "without the tokens that were not the likeliest",
        "the log-prob of the likeliest token in place of the sampled one's",
    ),
    "repetition_penalty": Row(
        "bug",
        "the engine penalises tokens that came before, and only the rollout column knows of it",
        "whether a token came before makes no difference between two engines of one model",
        "the sampling parameters of the rollout and generation_config.json of the model: repetition_penalty, "
        "presence_penalty, frequency_penalty",
        "sample with repetition_penalty=1.0 and without presence and frequency penalties (vLLM: "
        'generation_config="vllm" takes none from the model)',
        "without tokens that came before",
    ),
    "model_differs": Row(
        "bug",
        "engine and trainer compute different models, from the first step on",
        "two engines of one model in an unquantised format differ by rounding",
        "score the same responses once more with the checkpoint that both sides loaded: offpol-diag rescore "
        "DUMP --model CHECKPOINT --try all",
        "measure which side is another model: offpol-diag rescore DUMP --model CHECKPOINT --try all says "
        "which of them the checkpoint reproduces, and which change of the model reproduces the other",
    ),
    "wrong_mask": Row(
        "bug",
        "the response mask includes tokens that were not sampled: {place}",
        "a token that the engine did not sample has no rollout log-prob",
        "print response_mask beside the text of the sequences named here",
        "set response_mask to 0 on tool output, observations and padding (in multi-turn rollouts: 1 only on "
        "tokens that the model generated)",
        "with these tokens masked",
        "unsampled tokens inside the mask",
    ),
    "off_by_one": Row(
        "bug",
        "the rollout column is shifted by {tokens} against the train column",
        "both columns are about the same sampled token",
        "shift one column by {tokens}: K3 falls as it does below",
        "{slice}; logits at position t − 1 score token t, so slice logits[:, :-1] and tokens[:, 1:]",
        "with the shift undone",
        "columns shifted against each other (by up to 8 tokens)",
    ),
    "row_permutation": Row(
        "bug",
        "rows are permuted: train log-probs stand beside another sequence's rollout log-probs, within "
        "{within}",
        "both columns are about the same sequence",
        "rows whose train log-probs belong to another row: {examples}",
        "restore the order after dynamic batching or sorting by length (verl: revert_dynamic_batch, "
        "restore_dynamic_batch indices on every log-prob tensor), or join by sequence id",
        "with the rows matched",
        "permuted rows",
    ),
    "boundary": Row(
        "bug",
        "{place} is logged wrongly",
        "a mismatch of kernels or weights does not single out one position",
        "compare both columns at {place} of a few sequences with log-softmax of its logits",
        "shift within each sequence and not across packed ones (use cu_seqlens, not torch.roll), and log the "
        "end-of-sequence token as it was sampled",
        "without these tokens",
        "a first or last token that carries the mismatch",
    ),
    "special_token": Row(
        "bug",
        "tokens with id {ids} are scored differently wherever they stand",
        "a mismatch of kernels or weights does not single out one token",
        "decode id {ids}; compare its embedding and its row of the output layer in engine and trainer",
        "sync embeddings and lm_head of added tokens (resize_token_embeddings on both sides), and treat "
        "bad_words and logit_bias alike in engine and trainer",
        "without these tokens",
        "single token ids that carry the mismatch",
    ),
    "retokenization": Row(
        "bug",
        "{share} of the sequences break at some token: from there on the columns belong to different text",
        "columns that agree token by token do not stop to within a sequence",
        "decode token_ids of the sequences named here around the break; compare with the ids that the "
        "engine returned",
        "train on the engine's token ids (vLLM: return_token_ids / prompt_token_ids; SGLang: output_ids) "
        "instead of tokenizing the text again",
        "without what follows the breaks",
        "sequences that break at a token",
    ),
    "long_context": Row(
        "bug",
        "beyond about token {where} the engine computes something else",
        "kernels and weights differ at every position alike",
        "score one long response with the engine's prefill (prompt_logprobs) and with its decode; compare "
        "beyond token {where}",
        "switch off what only acts on long contexts: vLLM --disable-cascade-attn, "
        "--no-enable-chunked-prefill, a KV "
        "cache in fp8, a sliding window, rope scaling that differs between engine and trainer",
        "without what lies beyond",
        "a position from which on the columns disagree",
    ),
    "wrong_context": Row(
        "bug",
        "engine and trainer scored {share} of the responses after different prompts",
        "the same weights after the same prompt give about the same log-probs",
        "print the prompt ids that the engine got and those the trainer used for one of these sequences",
        "apply the chat template once, with the same system prompt and tools, and pass prompt ids instead "
        "of text",
        "without these sequences, or from token 32 on where all are concerned",
        "responses scored after another prompt",
    ),
    "truncated_sampling": Row(
        "bug",
        "tokens were sampled with top-p, top-k or min-p, and only the rollout column knows of it",
        "E[r] = 1: here r = the probability mass that was kept, never above 1",
        "the sampling parameters of the rollout: top_p < 1, top_k > 0 or min_p > 0",
        "sample with top_p=1.0, top_k=-1 and min_p=0, or apply the same filter to the trainer's logits",
        "with the rollout log-probs renormalised over the whole vocabulary (approximate)",
        "top-p or top-k on one side",
    ),
    "rollout_raw_logprobs": Row(
        "bug",
        "the rollout column does not hold the distribution that tokens were sampled from{temperature}",
        "k1 ≥ 0 and E[r] = 1 for tokens sampled from the logged distribution",
        "compare a logged value with log-softmax(logits / temperature) of that token",
        "log processed log-probs in the engine (vLLM: logprobs_mode=processed_logprobs; SGLang: "
        "--enable-return-processed-logprobs or temperature 1)",
        "",
        "tokens sampled from another distribution than the logged one",
    ),
    "trainer_temperature": Row(
        "bug",
        "the trainer does not divide its logits by the sampling temperature{temperature}",
        "log π_train is not a power of log π_rollout under any noise or staleness",
        "look for the division by temperature in the trainer's log-prob computation",
        "divide the logits by the temperature before log-softmax (verl: "
        "actor_rollout_ref.rollout.temperature reaches compute_log_prob; TRL: temperature in GRPOConfig)",
        "",
        "a temperature on one side only",
    ),
    "low_precision_storage": Row(
        "bug",
        "the {column} log-probs were rounded to {grid} before they were written",
        "log-probs in float32 do not lie on such a grid",
        "the dtype of the tensor when it is gathered, cast or serialised",
        "compute log-softmax in float32 and keep it so: no .to(torch.bfloat16), no rounding in JSON",
        "",
        "rounded log-probs",
    ),
    "group_fault": Row(
        "bug",
        "sequences with {where} differ {times}-fold more than the others",
        "engines with the same weights and kernels differ alike",
        "restart or replace what is behind {where}, and compare again",
        "check the weights, the version and the flags of {where}: a replica that missed a weight sync, "
        "another dtype or kernel",
        "without these sequences",
        "one engine, host or other group that stands out",
    ),
    "sync_stopped": Row(
        "bug",
        "new weights do not reach the engine {since}: it goes on sampling with old ones",
        "the engine has the weights of the version that the dump gives it",
        "make a digest of one weight tensor in engine and trainer after the next sync (columns "
        "weight_digest_rollout and weight_digest_train), and list the adapters that the engine holds",
        "look at what carries the weights over: adapters that are never sent (vLLM: enable_lora, and the "
        "LoRA request on every call), names that the engine does not know, a sync that is skipped or fails",
        "without these sequences",
    ),
    "weights_differ": Row(
        "bug",
        "the engine has other weights than the trainer {since}",
        "at policy lag 0 the engine has the trainer's weights",
        "make both digests again after the next sync, of each weight tensor by itself",
        "compare the tensors that differ: the head and tied embeddings, experts, what an adapter adds and at "
        "which scale, weights that the engine repacks when it loads them; or write the policy lag",
        "without these sequences",
    ),
    "stale": Row(
        "honest",
        "stale weights: the engine sampled with older weights than the trainer's",
        "",
        "K3 by policy_lag falls to the engine's own level at lag 0",
        "fewer steps between weight syncs",
    ),
    "moe_outliers": Row(
        "honest",
        "most tokens agree closely and a few differ by much, as where experts are routed differently",
        "",
        "log router choices on both sides; replay them in the trainer (routing replay, R3)",
        "router in float32, or routing replay",
    ),
    "quantized_rollout": Row(
        "honest",
        "a quantised rollout, as the dump says ({recorded})",
        "",
        "the same dump with a bf16 rollout",
        "a higher precision of the rollout",
    ),
    "numerics": Row("honest", "numerics: the same weights computed by two engines", "", "", ""),
}
"""Cause id → row."""
