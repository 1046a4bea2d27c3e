"""A small LLaMA, and its parameters counted by hand."""

#: A LLaMA with sizes that divide by eight processes.
LLAMA = {
    "model.d_model": 64,
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.d_ff": 96,
    "model.vocab_size": 128,
    "model.max_seq_len": 32,
    "model.mlp": "swiglu",
    "snapshot.seq_len": 8,
    "trainer.micro_batch_size": 2,
    "trainer.global_batch_size": 64,
    "trainer.precision": "bf16",
}
#: Its parameters, by hand: in one block; in the embeddings; in last norm and head; and in those two.
BLOCK, TABLE, HEAD = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64, 128 * 64, 64 + 128 * 64
OUTSIDE = TABLE + HEAD
