"""The model families: what the model_type of a config.json fixes. The one place that lists them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """A text model. Of several values the first holds where the config names none."""

    architecture: str
    scoring: str
    group_score: str
    bias: bool
    methods: tuple[str, ...]  # of topk_method
    normalize: tuple[bool, ...]  # of norm_topk_prob, which every config names
    interleave: tuple[bool, ...]  # of rope_interleave


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A text model under text_config, of one of FAMILIES, beside a vision tower."""

    architectures: tuple[str, ...]
    prefix: str  # of the text model's tensors
    vision: tuple[str, ...]  # prefixes of the others


_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    scoring="softmax",
    group_score="max",
    bias=False,
    methods=("greedy", "group_limited_greedy"),
    normalize=(False,),
    interleave=(True,),
)
_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    scoring="sigmoid",
    group_score="sum2",
    bias=True,
    methods=("noaux_tc",),
    normalize=(True, False),
    interleave=(True, False),
)
_K25 = Wrapper(
    architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    prefix="language_model.",
    vision=("vision_tower.", "mm_projector."),
)
FAMILIES = {"deepseek_v2": _V2, "deepseek_v3": _V3, "kimi_k2": _V3}
WRAPPERS = {"kimi_k25": _K25}

# Keys that change nothing here: training, generation by another library, special tokens that the
# tokenizer knows better, defaults that old configs spell out.
IGNORED = frozenset(
    """model_type torch_dtype dtype transformers_version auto_map use_cache attention_dropout
    initializer_range aux_loss_alpha seq_aux ep_size pretraining_tp bos_token_id pad_token_id
    _name_or_path output_router_logits router_aux_loss_coef id2label label2id return_dict
    _attn_implementation add_cross_attention bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id is_decoder is_encoder_decoder
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16""".split()
)
# Of a wrapper: about images. Whether embeddings are tied is the text model's to say: transformers
# writes True here for checkpoints that have both matrices.
IGNORED_OF_WRAPPERS = IGNORED | frozenset(
    """vision_config tie_word_embeddings ignore_index media_placeholder_token_id image_token_id
    video_token_id vision_start_token_id vision_end_token_id projection_hidden_size
    projection_layer_norm_eps use_unified_vision_chunk video_placeholder encoder_only
    language_only""".split()
)
