import numpy as np
import pytest
import tokenizers as library

from kvjax.config import ConfigError, DataConfig
from kvjax.data import sources
from kvjax.data.tokenizers import build_tokenizer, check_vocabulary, load_tokenizer, make_tokenizer

TEXT = "Hello world: naïve café, 東京 🦜\n\tand <|endoftext|> and </s>"


@pytest.fixture(scope="module", params=["bytes", "gpt2", "bpe:300", "file"])
def any_tokenizer(request, tmp_path_factory, texts):
    if request.param != "file":
        return build_tokenizer(request.param, lambda: texts)
    words = {"[UNK]": 0, "Hello": 1, "world": 2, "</s>": 3}
    model = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    model.enable_truncation(1)
    model.enable_padding(length=7)
    path = tmp_path_factory.mktemp("file") / "tokenizer.json"
    model.save(str(path))
    return build_tokenizer(str(path), lambda: [])


def test_round_trip_and_bytes(any_tokenizer):
    ids = any_tokenizer.encode(TEXT)
    assert any_tokenizer.eos_id not in ids and max(ids) < any_tokenizer.vocab_size
    batch = any_tokenizer.encode_batch([TEXT, "", "Hello"])
    assert batch[0].tolist() == ids and len(batch[1]) == 0 and batch[2].tolist() == any_tokenizer.encode("Hello")
    if any_tokenizer.token_bytes is not None:
        assert any_tokenizer.decode(ids) == any_tokenizer.decode([any_tokenizer.eos_id, *ids]) == TEXT
        assert any_tokenizer.token_bytes[ids].sum() == len(TEXT.encode())
        assert any_tokenizer.token_bytes[any_tokenizer.eos_id] == 0


def test_saved_tokenizer_is_the_same(any_tokenizer, tmp_path):
    any_tokenizer.save(tmp_path / "tokenizer")
    again = load_tokenizer(tmp_path / "tokenizer")
    assert again.encode(TEXT) == any_tokenizer.encode(TEXT)
    assert (again.vocab_size, again.eos_id) == (any_tokenizer.vocab_size, any_tokenizer.eos_id)


def test_gpt2_known_ids(tmp_path):
    gpt2 = make_tokenizer(DataConfig(tokenizer="gpt2"))
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)
    assert gpt2.token_bytes[[15496, 995, 50256]].tolist() == [5, 6, 0]
    with pytest.raises(ConfigError, match="encoder.json does not exist"):
        build_tokenizer(f"gpt2:{tmp_path}", lambda: [])


def test_bytes_need_no_more_than_256_tokens(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (256, 255)
    assert tokenizer.encode("é") == [195, 169]
    assert tokenizer.decode([195]) == "\ufffd"


def test_file_keeps_no_truncation_or_padding(any_tokenizer):
    if any_tokenizer.token_bytes is None:
        assert any_tokenizer.encode("Hello world Hello") == [1, 2, 1]


def test_bpe_is_trained_on_the_training_split_only(tmp_path):
    held_word, seen_word = "zq" * 200, "ab" * 20  # the held-out word would be merged first, if it were seen
    for i in range(40):
        held = sources.hash_position(f"{i} {held_word}") < 0.2
        (tmp_path / f"{i}.txt").write_text(f"{i} {held_word if held else seen_word}")
    config = DataConfig(source=f"text:{tmp_path}", tokenizer="bpe:258", validation_fraction=0.2)
    assert any(held_word in text for text in sources.load_documents(config).validation)
    bpe = make_tokenizer(config)
    assert (len(bpe.encode("ab")), len(bpe.encode("zq"))) == (1, 2)


def test_bpe_training_is_deterministic(texts, tmp_path):
    for name in "ab":
        build_tokenizer("bpe:300", lambda: texts).save(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_text() == (tmp_path / "b/tokenizer.json").read_text()


@pytest.mark.parametrize("spec, message", [
    ("bpe:256", "at least 257"), ("bpe:lots", "bpe:SIZE"), ("gtp2", "'gtp2': choose bytes"),
    ("no/tokenizer.json", "no/tokenizer.json does not exist"),
])
def test_wrong_tokenizers(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(spec, lambda: [])


def test_unreadable_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot|can read"):
        load_tokenizer(path)
    library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(tmp_path)


def test_vocabulary_must_fit_the_model(tokenizer):
    check_vocabulary(tokenizer, 256)
    check_vocabulary(tokenizer, 512)
    with pytest.raises(ConfigError, match="vocab_size is 255.*256 tokens: set model.vocab_size to 256"):
        check_vocabulary(tokenizer, 255)
    assert tokenizer.token_bytes.dtype == np.int32
