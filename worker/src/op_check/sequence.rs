//! Ops on sequences: embeddings, attention, CTC.

use burn_ir::{
    AttentionOpIr, CtcLossBackwardOpIr, CtcLossOpIr, EmbeddingBackwardOpIr, EmbeddingOpIr,
    ScalarIr, TensorIr,
};

use tensord_backend::ARE_GPUS_EXACT;

use super::{
    OpCheckResult, RuleViolation,
    index::check_indexable,
    rules::{
        Kind, check_dims, check_output, check_same_as_input, dims_of_rank, format_dims, has_dtype,
        must, product, same_dtype, sum,
    },
    scratch::{bytes, f32_copy_bytes, indices, saturating_product, saturating_sum, threads},
};

/// Scores of a head that Flex holds at once: all if there are at most [`MAX_SCORES`], otherwise
/// those of [`KEY_TILE`] keys.
const MAX_SCORES: u64 = 256 << 10;
const KEY_TILE: u64 = 64;

/// Number of tensors of the size of all scores that CubeCL's backend holds at once, and bytes of each element of a
/// causal mask.
const SCORE_COPIES: u64 = 3;
const CAUSAL_BYTES: u64 = 10;

/// Most steps of a CTC loss. Each step is a dozen ops, however small its tensors.
const MAX_STEPS: usize = 1 << 20;

/// Number of tensors of the size of all states that a CTC loss holds at once, including its
/// gradient.
const STATE_COPIES: u64 = 8;

pub(super) fn embedding(op: &EmbeddingOpIr) -> OpCheckResult {
    let [rows, width] = table_dims(&op.weights)?;
    let [batch, length] = index_dims(&op.indices)?;
    check_output(&op.out, &[batch, length, width], op.weights.dtype)?;
    check_indexable(&[rows], &op.out)?;
    Ok(saturating_sum(&[bytes(&op.weights), indices(&op.indices)]))
}

pub(super) fn embedding_backward(op: &EmbeddingBackwardOpIr) -> OpCheckResult {
    let [rows, width] = table_dims(&op.weights)?;
    let [batch, length] = index_dims(&op.indices)?;
    check_indexable(&[rows], &op.out_grad)?;
    same_dtype(&op.weights, &op.out_grad)?;
    check_dims("the gradient", &op.out_grad, &[batch, length, width])?;
    check_same_as_input(&op.out, &op.weights)?;
    Ok(saturating_sum(&[bytes(&op.out_grad), indices(&op.indices)]))
}

fn table_dims(weights: &TensorIr) -> Result<[usize; 2], RuleViolation> {
    Kind::Float.of(weights)?;
    let dims = dims_of_rank("the weights", weights, 2)?;
    Ok([dims[0], dims[1]])
}

fn index_dims(indices: &TensorIr) -> Result<[usize; 2], RuleViolation> {
    Kind::Int.of(indices)?;
    let dims = dims_of_rank("the indices", indices, 2)?;
    product(dims)?;
    Ok([dims[0], dims[1]])
}

pub(super) fn attention(op: &AttentionOpIr) -> OpCheckResult {
    Kind::Float.of(&op.query)?;
    for tensor in [Some(&op.key), Some(&op.value), op.attn_bias.as_ref()] {
        tensor.map_or(Ok(()), |tensor| same_dtype(&op.query, tensor))?;
    }
    let query = dims_of_rank("the query", &op.query, 4)?;
    let key = dims_of_rank("the key", &op.key, 4)?;
    let value = dims_of_rank("the value", &op.value, 4)?;
    let fits = key[0] == query[0]
        && key[3] == query[3]
        && value[..3] == key[..3]
        && key[1] >= 1
        && query[1].is_multiple_of(key[1])
        && query[3] >= 1;
    must!(
        fits,
        "a query {}, a key {} and a value {} do not fit each other",
        format_dims(query),
        format_dims(key),
        format_dims(value)
    );
    let scores = [query[0], query[1], query[2], key[2]];
    product(&scores)?;
    if let Some(mask) = &op.mask {
        Kind::Bool.of(mask)?;
    }
    for (what, over) in [("mask", &op.mask), ("bias", &op.attn_bias)] {
        let Some(over) = over else { continue };
        let over = dims_of_rank("the mask or the bias", over, 4)?;
        let fits = over
            .iter()
            .zip(&scores)
            .all(|(of, to)| of == to || *of == 1);
        must!(
            fits,
            "a {what} {} cannot be broadcast to the scores {}",
            format_dims(over),
            format_dims(&scores)
        );
    }
    let positive = match op.options.softcap {
        None => true,
        Some(ScalarIr::Float(cap)) => cap > 0.0,
        Some(ScalarIr::Int(cap)) => cap > 0,
        Some(ScalarIr::UInt(cap)) => cap > 0,
        Some(ScalarIr::Bool(cap)) => cap,
    };
    must!(
        positive,
        "a soft cap of {:?} must be positive",
        op.options.softcap
    );
    let derived = [query[0], query[1], query[2], value[3]];
    check_output(&op.out, &derived, op.query.dtype)?;
    Ok(attention_bytes(op, &scores))
}

fn attention_bytes(op: &AttentionOpIr, scores: &[usize; 4]) -> u64 {
    let rows = scores[2] as u64;
    let tile = rows
        .saturating_mul(KEY_TILE)
        .max(MAX_SCORES)
        .min(saturating_product(&scores[2..]).max(1));
    let heads = saturating_product(&scores[..2]).min(threads());
    // Two numbers per row in addition to the scores. Masks and biases are expanded to the
    // dims of the scores.
    let each = tile
        .saturating_add(rows.saturating_mul(2))
        .saturating_mul(8);
    let spread = |over: &Option<TensorIr>| {
        over.as_ref().map_or(0, |over| {
            saturating_product(scores).saturating_mul(over.dtype.size().max(4) as u64)
        })
    };
    saturating_sum(&[
        each.saturating_mul(heads),
        spread(&op.mask),
        spread(&op.attn_bias),
        bytes(&op.query),
        bytes(&op.key),
        bytes(&op.value),
        f32_copy_bytes(&op.query),
        f32_copy_bytes(&op.key),
        f32_copy_bytes(&op.value),
        f32_copy_bytes(&op.out),
    ])
}

/// Returns the bytes of an attention's scores on a GPU, of which its tiled kernel holds only some at once. It has no scale,
/// cap or bias: with these, and where GPUs are exact, CubeCL's backend computes all scores, and their exponentials
/// from copies without the maximum.
pub(super) fn all_scores_bytes(op: &AttentionOpIr) -> u64 {
    let options = &op.options;
    let is_tiled = options.scale.is_none() && options.softcap.is_none() && op.attn_bias.is_none();
    if is_tiled && !ARE_GPUS_EXACT {
        return 0;
    }
    let dims = |tensor: &TensorIr, axis: usize| tensor.shape.get(axis).copied().unwrap_or(0);
    let scores = [
        dims(&op.query, 0),
        dims(&op.query, 1),
        dims(&op.query, 2),
        dims(&op.key, 2),
    ];
    let mask = match options.is_causal {
        true => saturating_product(&scores[2..]).saturating_mul(CAUSAL_BYTES),
        false => 0,
    };
    let each = op.query.dtype.size() as u64;
    let scores = saturating_product(&scores).saturating_mul(SCORE_COPIES * each);
    scores.saturating_add(mask)
}

pub(super) fn ctc_loss(op: &CtcLossOpIr) -> OpCheckResult {
    let lengths = [&op.input_lengths, &op.target_lengths];
    let (dims, scratch) = ctc(&op.log_probs, &op.targets, lengths, op.blank)?;
    check_output(&op.out, &[dims[1]], op.log_probs.dtype)?;
    Ok(scratch)
}

pub(super) fn ctc_loss_backward(op: &CtcLossBackwardOpIr) -> OpCheckResult {
    let lengths = [&op.input_lengths, &op.target_lengths];
    let (dims, scratch) = ctc(&op.log_probs, &op.targets, lengths, op.blank)?;
    same_dtype(&op.log_probs, &op.grad_loss)?;
    check_dims("the gradient", &op.grad_loss, &[dims[1]])?;
    has_dtype(&op.out, op.log_probs.dtype)?;
    check_same_as_input(&op.out, &op.log_probs)?;
    Ok(scratch)
}

/// Checks the inputs of a CTC loss. Returns the dims of the probabilities, and the bytes that
/// the loss needs in addition to inputs and outputs.
fn ctc<'a>(
    log_probs: &'a TensorIr,
    targets: &TensorIr,
    lengths: [&TensorIr; 2],
    blank: usize,
) -> Result<(&'a [usize], u64), RuleViolation> {
    Kind::Float.of(log_probs)?;
    Kind::Int.of(targets)?;
    let of = dims_of_rank("the probabilities", log_probs, 3)?;
    let labels = dims_of_rank("the targets", targets, 2)?;
    must!(
        labels[0] == of[1] && blank < of[2] && (1..=MAX_STEPS).contains(&of[0]),
        "targets {} with {blank} as blank do not fit {} (1 to {MAX_STEPS} steps are allowed)",
        format_dims(labels),
        format_dims(of)
    );
    for length in lengths {
        same_dtype(targets, length)?;
        check_dims("the lengths", length, &[of[1]])?;
    }
    let states = sum(&[product(&[labels[1], 2])?, 1])?;
    let all = saturating_product(&[of[0], of[1], states]);
    let scratch = all.saturating_mul(STATE_COPIES).saturating_mul(8);
    Ok((
        of,
        scratch.saturating_add(bytes(log_probs).saturating_mul(2)),
    ))
}
