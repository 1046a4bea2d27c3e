"""What a model card says that no run is needed for."""

from birthmark.models.config import ModelConfig
from birthmark.report.model_card import RunFacts, model_card

CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=8)


def test_a_bar_in_a_cell_makes_no_column():
    card = model_card("m", CONFIG, 0, RunFacts({"data": {"kind": "a|b"}}))
    assert "| kind | a\\|b |" in card


def test_weights_in_a_gguf_file_are_loaded_by_its_name_and_the_tokenizer_too():
    card = model_card("m", CONFIG, 3, RunFacts(), gguf_file="model.gguf", has_tokenizer=True)
    for line in (
        'model = AutoModelForCausalLM.from_pretrained("m", gguf_file="model.gguf")',
        'tokenizer = AutoTokenizer.from_pretrained("m", gguf_file="model.gguf")',
    ):
        assert line in card.splitlines()
    assert "after 3 steps of training" in card
    alone = model_card("m", CONFIG, 3, RunFacts(), gguf_file="model.gguf", hf_reads_gguf=False, has_tokenizer=True)
    assert "llama.cpp, and what is built on it, loads `model.gguf`" in alone
    assert "library_name: llama.cpp" in alone.splitlines()
    assert "from_pretrained" not in alone


def test_how_a_model_began_is_said_as_it_was():
    digest = "5" * 64
    drawn = model_card("m", CONFIG, 0, RunFacts({"digest": digest}))
    assert "The config and the run's seed alone draw the same weights" in drawn
    continued = model_card("m", CONFIG, 0, RunFacts({"digest": digest, "init_from": "other"}))
    assert f"It began from another model's weights. SHA-256 of every parameter as it began: `{digest}`." in continued
    assert "Not known" in model_card("m", CONFIG, 0, RunFacts())
