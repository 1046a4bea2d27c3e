"""The bigram-backcopy task (definitions §11, arXiv 2410.13835): a language in which an attention sink is useful."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from .streams import stream_key, uniforms

if TYPE_CHECKING:
    from torch import Tensor

BOS = 0
TRIGGERS = (1, 2, 3)
_FIRST_ORDINARY = 4
_MIN_VOCAB_SIZE = 8
_TRIGGER_PROBABILITY = 1 / 7  # after an ordinary token; with the copy behind it, 1 position in 8 is a trigger
_MAX_SUCCESSORS = 64  # keeps the table linear in the vocabulary
_LOGIT_STD = 2.0  # a favourite successor holds about a quarter of its row: quick to learn, far from uniform


class BackCopy:
    """An endless source of samples of the task, a pure function of (data_seed, split, sample index). 3049s Which
    documents are for validation. => Choice of the documents for validation. or that of its text where it has no name;
    => or that of its text if it has no name; if the hashes put all on one side, the one nearest to the other side
    changes. A single document is split: its end is for validation. => if the hashes put all on one side, the document
    nearest to the other side changes sides. A single document is split: its end is for validation. 3050 Codes (uint8)
    of a document's use: all of it for training or for validation, none of it, or a part for each. 3051 Hash a key with
    SHA-256, to a fixed length, so that keys and contents stay separate in a hash of both. 3052 Return the 64 bits of a
    document's name that decide its split. 3053s The 64 bits of each text that decide its split where no name does, and
    by which equal texts are found: uint64. => Return the 64 bits of each text that decide its split if it has no name,
    and by which equal texts are found: uint64. XXH3, since tables have a text in every row: nothing else in Python is
    as fast. Who writes a corpus can make two texts share a hash; that puts them on one side, and no more. => The hash
    is XXH3, since tables have a text in every row: nothing else in Python is as fast. An author of a corpus can make
    two texts share a hash; that only puts both on one side. 3054 Compute `text_hashes` of one text. 3055 Return True
    for 64-bit hashes below ``val_fraction`` of their range: bool, in the shape of ``hashes``. 3056 Return True for the
    documents (`name_hash` or `text_hash`, uint64 ``[n]``) that are for validation: bool ``[n]``. 3057~ Return the code
    of each document's use: 3058~ Return the number of characters of a corpus' only document that go to training. 3059s
    The only document of a corpus: its last ``val_fraction``, from a line's start on, is for validation. => Split the
    only document of a corpus: its last ``val_fraction``, from a line's start on, is for validation. 3060 Seed of the
    texts' hashes, different from those by which others sample or deduplicate. 3061s Sets that are never whole on the
    disk: read file by file, tokenised ahead, found again to the token. => Streamed sets, never whole on the disk: read
    file by file, tokenised ahead, resumed to the token. 3062s Sources of streamed samples: exact shares in every global
    batch, at positions that change from step to step. => Order of streamed samples: exact shares of the sources in
    every global batch, at positions that change from step to step. 3063s The samples of another order, shuffled within
    each global batch. => Another order whose samples are shuffled within each global batch. A stream owns a part of
    every batch. Where the pattern of the sources repeats with the batch, each part would have the same sources at every
    step, and the files of some streams would never be read. => A stream owns a part of every batch. If the pattern of
    the sources repeated with the batch, each part would have the same sources at every step, and the files of some
    streams would never be read. order: which sources a batch has. => order: order that gives the sources of a batch.
    sizes: of the global batches. => sizes: sizes of the global batches. data_seed: decides the shuffling, with the step
    alone. => data_seed: seed of the shuffling, which otherwise depends only on the step. 3064 Return the number of
    steps before the one that trains on a sample. 3065s One of the streams that a set is read in: its own files in an
    order of their own, windows of their tokens, shuffled. => Streams of a set: each reads its own files in its own
    order, and shuffles windows of their tokens. A set is always read in the same number of streams, however many
    processes there are. Where one stands is six numbers: its samples so far, those before the windows that are being
    shuffled, and the pass, file, row and token at which these windows begin. They are read again where a run goes on,
    so that no buffer need be kept. => A set is always read in the same number of streams, for any number of processes.
    The place of a stream is six numbers: its samples so far, those before the windows that are being shuffled, and the
    pass, file, row and token at which these windows begin. A resumed run reads these windows again, so that no buffer
    need be kept. 3066 Place of a stream in its set. Plain numbers, for a checkpoint. 3067 Number of samples given so
    far. 3071 Token within the row's text. 3072 Settings that all streams of a run share. 3078 Result that a thread
    prepares in advance. 3079 Wait for the result; raise its error if it failed. 3080 Wait for the thread, for a limited
    time. 3081 Error for a stream that was closed while its next windows were read. 3082s Of fewer files than streams
    each is read by several, whose rows take turns. Documents whose hash is below ``val_fraction`` are left out: they
    are for validation. => If there are fewer files than streams, several streams share a file and take turns at its
    rows. Documents whose hash is below ``val_fraction`` are left out: they are for validation. 3083 Place from which
    the stream would continue. 3084 Return the next ``n`` samples: int64 ``[n, seq_len + 1]``. 3085 End the stream's
    thread. 3086 Yield buffers from the one at ``place`` on. 3087 Yield place and ids of documents from the one at
    ``place`` on, the first from its token on, pass after pass. 3088 Yield the rows of this stream in a file, with their
    tokens. 3089 Return True if a document is for validation; its content decides, as for rows of tables. 3090 Time, in
    seconds, that the end of a run waits for an unfinished read. 3091s A rank's micro-batches of streams: all streams
    give alike, each a contiguous part of the global batch. => A rank's micro-batches from streams: each stream gives an
    equal, contiguous part of the global batch. Where L does not divide the batch, parts differ by one sample and
    streams take turns at the longer ones, so that all give as many over L steps. The mixture says by a sample's number
    which source it comes from. A rank reads the streams that its own part of the batch touches at any step, and no
    others: with as many streams as processes, or a multiple of that, which divides the batch, no text is read twice. =>
    If L does not divide the batch, parts differ by one sample and streams take turns at the longer ones, so that all
    give equally over L steps. The mixture decides the source by a sample's number. A rank reads only the streams that
    its part of the batch touches at any step: if the number of streams is a multiple of the number of processes and
    divides the batch, no text is read twice. 3092 Samples of one or more streamed sets, in the shares of ``order``;
    their number is unknown. 3093 Open one stream of one source, from a place on. 3094s As
    `birthmark.data.micro_batches.MicroBatches`. => The form is that of `birthmark.data.micro_batches.MicroBatches`.
    source: what is read. => source: the streamed sets. first_step: steps before. => first_step: number of earlier
    steps. sizes: of the global batches. => sizes: sizes of the global batches. micro_batch_size: sequences of a
    micro-batch at most. => micro_batch_size: largest number of sequences in a micro-batch. rank: of ``world_size``. =>
    rank: this process among ``world_size``. places: of all streams after ``first_step`` steps; none at a run's start.
    => places: places of all streams after ``first_step`` steps; none at a run's start. RunError: there are no such
    places. => RunError: the streams have no such places. 3095 Return this rank's part of a global batch. 3096 List the
    streams whose parts of batches of this size reach into this rank's at any step. 3097 Return the positions in a
    step's batch that a stream fills. 3098 Read this rank's part of the batch: int64 ``[n, seq_len + 1]``. 3099 Return
    the places of this rank's streams after ``step`` steps, which must be recent. 3101 Place of every stream that was
    read, by its number and its source. 3102 Samples lost to rounding go to another part at the next step. 3103s Rows of
    tables that are read from their first to their last, through ``datasets``, and kept nowhere. => Rows of tables that
    are read in order, through ``datasets``, and not stored. Its own shuffling loses the rows in its buffer when a run
    goes on (datasets#7901), and its own states have skipped rows (#7538) and stood still (#8308). => The library's
    shuffling loses the rows in its buffer when a run resumes (datasets#7901), and its states have skipped rows (#7538)
    and failed to advance (#8308). 3105 Names of the files without credentials, fit to be shown. 3106~ Hash the column's
    name and the names of all files. 3106s Local files are told apart by their sizes too, those of a hub by its
    revision, which is in their names. => Sizes of local files count too; files of a hub have its revision in their
    names. 3107 Return the name of a file, for messages. 3108~ Yield the texts of a file from a row on, in its order.
    3109~ Find the tabular files that ``data.path`` names, and the suffix of their kind; 3109s UsageError: there are
    none, or of several kinds; or a local one does not begin like one. => UsageError: there are none, or several kinds;
    or a local file does not begin like its kind. 3110 Its log lines about an unreadable file repeat the raised error.
    Threads read until the end. 3111s Validation text of a set that is never whole: => Validation text of a streamed
    set: 3113~ Return the tokens of the first ``n_documents`` whose hash is below ``val_fraction``, and `HeldOutMeta`.
    3113s UsageError: there is none. => UsageError: there is no such document. 3114s a stream is named by words, and any
    part of it can be read without the rest. => words name a stream, and any part of it can be read without the rest.
    3115 Return 64 bytes that depend on every word and their order, and on nothing else. 3116~ Return rows ``first`` to
    ``first + shape[0]`` of the stream that ``words`` name: 3117s What is known of a corpus's documents before any is
    tokenised: hash, size, and where each belongs. => Survey of a corpus's documents before tokenisation: hash, size and
    split of each. 3118s A word is what stands between white space, in lower case and without everything that is neither
    letter nor digit. So case, punctuation => A word is the text between white space, in lower case and without all
    characters that are neither letter nor digit. So case, punctuation 3119s All ``n`` words in a row of some texts. =>
    All sequences of ``n`` words in some texts. Hashes of 64 bits stand for them. They are only compared where all ``n``
    words are words of these texts, => They are kept as hashes of 64 bits, compared only where all ``n`` words occur in
    these texts, 3120 Collect the n-grams of some texts; none reaches from one text into the next. 3122 Load the files
    that `save` wrote. 3123 Return True if a text holds one of them. 3124 A piece of a corpus with the n-grams to search
    for. 3126 Return True for each document of a piece that holds an n-gram. 3127 Yield the words of a text, block by
    block. 3129 Number of words, among the n from each place on, that occur in the texts. 3131 Consecutive documents, in
    a form that can be sent to another process. 3132 Yield the documents with their splits. 3133 Base of such corpora;
    subclasses know hashes and sizes, and read documents. 3135 Name of the rule for its own splits, if that is not the
    documents' names. 3136 Numbers of surveyed documents that are left out, by reason. 3137 Compute the SHA-256, in hex,
    over keys and contents in order; any changed byte changes it. 3138 Hash of each document's key, which decides its
    split: uint64 ``[n]``. 3140 UTF-8 bytes of each document: int64 ``[n]``; 0 for those left out. 3141 Return the
    documents from number ``first`` on, one for each of ``codes`` (`birthmark.data.splits`). 3142 Count the files or
    rows that yield no document, by reason. 3143 Raise UsageError if there is no document at all. 3144 Code of each
    document's use if nothing else decides: uint8 ``[n]``. 3145 Code of each document's use: uint8 ``[n]``. 3146~ Return
    the same corpus with other splits. 3147 Key that separates these splits from others of the same content and
    fraction: the SHA-256, in hex, of given ones, else `own_splits`. 3149 Numbers of files or rows left out, by reason.
    3150 Yield all documents with their splits. 3151 Yield all documents in pieces of about ``n_bytes`` bytes of text,
    in order: bytes and piece. 3152s Validation that no training document of any source gives away, and how many
    documents stand there more than once. => Validation documents that occur in no source's training documents, and
    counts of duplicates. A 64-bit hash stands for a text; two texts of 10⁹ share one by chance with a probability of 3
    %. => Texts are compared by 64-bit hashes; among 10⁹ texts, two share one by chance with a probability of 3 %. 3153s
    What becomes of each document of several corpora: uint8 ``[n]`` each => Return the code of each document's use for
    several corpora: uint8 ``[n]`` each 3154s Documents whose text stands before them in their own source, by source;
    and texts too many across the sources. => Count documents whose text occurs earlier in their own source, by source;
    and surplus copies of texts across sources. The second number counts every source in which a text stands beyond the
    first. => The second number counts, for each text, the sources that hold it beyond the first. 3155 A text that a
    later source moved is moved in earlier ones too. 3156s Arrow's buffers are read where they lie. What is done for
    each row in Python is the call of the hash function, which has no other form. => Arrow's buffers are read in place.
    The only Python call per row is the hash function, which has no bulk form. 3157 Facts about rows, without their
    texts. 3160 Digests of every `BLOCK_ROWS` rows, in order; empty if not requested. 3161 Rows ``first`` to ``end`` of
    a table, in a form that can be sent to another process. 3162 Table reduced to its text column. 3163 Name of the
    table, for messages. 3164 Yield the number of the first row, and the rows as an Arrow array of strings, nulls as
    empty ones. 3165~ Compute hashes and sizes. 3165s with_sha256: whether to hash blocks of rows too; the first row
    begins one. => with_sha256: hash blocks of rows too; the first row begins one. UsageError: a row is no UTF-8; names
    it. => UsageError: a row is not UTF-8; names it. 3166 Yield the text of each row. 3167 Consecutive rows with the
    code of each row's use. 3168 Yield the documents that are not left out, with their splits. 3169s SHA-256 of every
    `BLOCK_ROWS` rows, however they come. => Hasher of every `BLOCK_ROWS` rows by SHA-256, for input in any portions.
    3171 Return the digests of all rows so far; the last block may be shorter. 3172 Yield the bytes of each row of an
    Arrow array with these buffers. 3173 Return the bytes of an Arrow array of strings without nulls, and the borders of
    its rows in them: ``[rows + 1]``. 3177 Facts about a file's content, or the reason why it is left out. 3179 Return
    the facts of every file; for a large corpus they are cached while the files are unchanged (`file_states`). 3181
    Count the files left out: reason → number. 3182 Compute the SHA-256 over (key, SHA-256 of the content) of every
    document in order; reads every file once. 3184 Yield the documents with their splits. 3186 SHA-256 of the part that
    is read, if known. 3187 The whole text. 3188~ Yield the text in blocks. 3189 Yield a long file as text of its split;
    if it is the only one, it is cut in two like in `split_single_document`. 3190~ Find files below ``root`` by
    lower-case suffix; 3191 Return a file with its key: the key of its content, if it is compressed. 3192 Yield bytes
    ``first`` to ``end`` of a file's content, block by block; UsageError names a file that cannot be read. 3193 Survey a
    file and return its facts. 3194s Corpora that are tokens already: files of other frameworks and our own shards,
    mapped into memory as they are. => Corpora of existing tokens: files of other frameworks and this project's shards,
    mapped into memory unchanged. 3195 Layout of a file of tokens, independent of its format. 3196 Location and layout
    of a file's tokens. 3197 Path below the named folder; decides the splits of its documents. 3200 Ends of documents,
    if the format has them: int64 ``[documents]``, ascending, the last is ``n_tokens``. 3203 Files that the tokens
    depend on. 3204 Map the tokens into memory; ``[n_tokens]``. 3205 Return the same file, all of one split. 3206 Return
    the size of a file. 3207s The numpy dtype of a file's tokens, from what the file says (None: nothing) and what
    ``data.token_dtype`` says. => Return the numpy dtype of a file's tokens, from the file (None: it does not say) and
    ``data.token_dtype``. UsageError: neither says it, or they contradict each other. => UsageError: neither gives it,
    or they contradict each other. 3208 Types of stored tokens, by their names in ``data.token_dtype``: little-endian
    numpy dtypes. 3209s the dtype as a number: of `_TORCH_DTYPES_MAPPING` behind ``no_header_tensor:``, of
    `_NUMPY_DTYPES_MAPPING` behind ``no_header_numpy:``. => the dtype as a number: a key of `_TORCH_DTYPES_MAPPING`
    behind ``no_header_tensor:``, a key of `_NUMPY_DTYPES_MAPPING` behind ``no_header_numpy:``. 3210 Return True if a
    folder has litdata's index with a chunk beside it. 3211~ Read the tokens of all chunks, in the index's order. 3211s
    UsageError: the items are no tokens, are compressed or encrypted, or a chunk is not what the index says. =>
    UsageError: the items are not tokens, are compressed or encrypted, or a chunk contradicts the index. 3212 Read the
    ends of items from a chunk's table of offsets. 3213s The end-of-text token stands *before* each document there. =>
    The end-of-text token comes *before* each document there. 3214 Return True if a file begins with one of llm.c's
    magic numbers. 3215~ Read the tokens behind the header. 3217 Return True if an index exists beside a ``.bin``. 3218~
    Read the tokens of a ``.bin`` with their documents. 3218s UsageError: the index lies about itself or about the
    ``.bin``. => UsageError: the index contradicts itself or the ``.bin``. 3219 Read the ends of documents from an index
    that is checked whole. 3220s Tokens and nothing else: nanoGPT's ``.bin`` => Files of bare tokens: nanoGPT's ``.bin``
    each document with its end-of-text token behind it. => each document followed by its end-of-text token. 3221 Return
    True if numpy wrote this file, with its header. 3222~ Read a file without a header. 3223~ Read a file that
    ``numpy.save`` wrote; 3223s UsageError: it is no flat array of whole numbers, or cut short. => UsageError: it is not
    a flat array of whole numbers, or it is cut short. 3224s A corpus of tokens, from the paths that a person names to
    what training and validation read. => Corpora of tokens, from the paths that a user names to the splits of training
    and validation. 3225 The two splits of a corpus of tokens, with the facts for a run's record. 3226s A folder of
    shards that this program wrote: it has a tokenizer and splits of its own. => A folder of shards that this program
    wrote, with their tokenizer and splits. 3227 Vocabulary size of the tokenizer that made them. 3229 Return the
    SHA-256, in hex, of the text that they were made from. 3230~ Return their splits. 3231s Token files of other
    frameworks, read where they lie, each once however often it is named. => Token files of other frameworks, read in
    place, each once even if named several times. 3232 Return the SHA-256, in hex, over name, layout and `_PARTS` parts
    of every file: no file is read whole for it. 3233~ Return the splits, of tokens below ``vocab_size``. 3233s
    UsageError: there is nothing for one of the splits. => UsageError: one of the splits is empty. 3234 Return the parts
    of both splits, and the largest token of each file if all were read for it. 3235 Return the largest token of each
    file, which is read whole once while it is unchanged. 3236s The corpus of tokens that ``data.path`` names; None: it
    names text. => Open the corpus of tokens that ``data.path`` names; None if it names text. A folder is one of tokens
    if it has the index of our shards or of litdata => A folder counts as tokens if it has the index of this project's
    shards or of litdata 3237 Merge all named files, in that order, by resolved path: a folder and a file in it may both
    be named. 3238~ Join the parts of all files. 3238s UsageError: one of the splits has nothing. => UsageError: one of
    the splits is empty. 3239 Count each token in windows spread evenly over a split; in all of it if it is small. 3240
    If token paths are named beside text, the field itself is not wrong. 3243s ``length`` tokens from each of
    ``starts``, across spans where need be; int64 ``[n, length]``. => Read ``length`` tokens from each of ``starts``,
    across spans if needed; int64 ``[n, length]``. 3244 Make the error for a file with a token outside the vocabulary.
    3245s Which tokens of a file are for validation. => Choice of a file's tokens for validation. Where a format or an
    end token says where documents end, => If a format or an end token marks the ends of documents, else the end of each
    file is. A file that was named for a split belongs to it whole. => otherwise the end of each file is. A file that
    was named for a split belongs to it whole. 3248 First token of its last document. 3250 Yield all tokens in order,
    `BLOCK` at a time. 3251 Return the largest token of a block; a negative one counts as larger than any. 3252 Split
    each file. If files have documents, even a single one, both splits are non-empty. 3253 Find the runs of documents of
    one split, block by block: only the borders of runs are kept. 3254p Mix bits with the finaliser of SplitMix64
    (Steele et al. 2014), uint64: neighbours get unrelated numbers. 3255 Table of the formats of token files, and the
    detection of a path's format. 3256 Recognition and reading of one kind of token files. 3257 Suffix of its files; "":
    it is a folder. 3259 Return True if a named path holds tokens: a token file, litdata's folder, or a folder without
    text. 3260s The format and the files of what a person named: a file, or a folder of them in the order of their
    paths. => Find the format and the files of a named path: a file, or a folder of files in the order of their paths.
    field: of the config, that names the path. => field: field of the config that names the path. 3261s a byte-level BPE
    trained here, or any ``tokenizers`` JSON file. => a byte-level BPE trained on the corpus, or any ``tokenizers`` JSON
    file. 3262 Largest accepted size of a tokenizer's JSON file, in bytes. 3265s One ``tokenizers`` JSON, with what a
    corpus needs: ids by batch, the end-of-text id, readable tokens. => A ``tokenizers`` JSON with the methods that a
    corpus needs: ids by batch, the end-of-text id, readable tokens. name: of the file, for messages. => name: name of
    the file, for messages. add_bos: put it before texts where the JSON itself puts nothing there. => add_bos: put it
    before texts if the JSON itself puts nothing there. 3267s A tokenizer of any kind: one of these, the path of a
    ``tokenizers`` JSON, or a fast one of ``transformers``. => Convert a tokenizer of any kind: one of this class, the
    path of a ``tokenizers`` JSON, or a fast one of ``transformers``. UsageError: it is none of them. => UsageError: it
    is of another kind. 3269 Largest id + 1, the size for an embedding table; a vocabulary may have holes. 3273s They
    are those that the JSON's post-processor puts there. Where it puts none, ``add_bos_token`` of
    ``tokenizer_config.json`` adds BOS. So BOS comes once, whichever of the two says so. An ``add_bos_token`` that is
    false takes nothing away, as in ``transformers`` 5. => The JSON's post-processor adds them. If it adds none,
    ``add_bos_token`` of ``tokenizer_config.json`` adds BOS. So BOS comes once, whichever of the two asks for it. A
    false ``add_bos_token`` removes nothing, as in ``transformers`` 5. 3275 Encode each text to ids, uint32, in parallel
    over the texts. 3276 Decode a sequence of ids to text; bytes that are not UTF-8 become U+FFFD. 3277~ Return one
    readable line per token: 3278s A byte-level BPE of ``vocab_size`` tokens: end of text, the 256 bytes, then merges by
    frequency. => Train a byte-level BPE of ``vocab_size`` tokens: end of text, the 256 bytes, then merges by frequency.
    It has fewer where the texts hold too few different pairs. The same texts in the same order give the same tokenizer,
    byte for byte, whatever larger number was asked for. => It has fewer if the texts hold too few different pairs. The
    same texts in the same order give the same tokenizer, byte for byte, for any larger ``vocab_size``. 3279 Map
    characters to the bytes that byte-level BPE spells with them: printable Latin-1 as itself, the rest from U+0100 on,
    in order.

    Token 0 is BOS, tokens 1 to 3 are triggers, the rest are ordinary. After an ordinary token the next follows a fixed
    table: a trigger with probability 1/7, else one of up to 64 ordinary successors, weighted by a softmax of normal
    logits. After a trigger the token before it is repeated, so that token is always ordinary: a trigger follows
    neither BOS nor a trigger, and the first ordinary token is uniform. ``data_seed`` decides table and samples; the
    splits share the table and no sample.

    Raises:
        UsageError: fewer than 8 tokens in the vocabulary, or fewer than 2 in a sequence.
    """

    n_tokens: int | None = None
    n_samples: int | None = None

    def __init__(self, vocab_size: int, seq_len: int, data_seed: int, split: str = "train", bos: bool = True) -> None:
        if vocab_size < _MIN_VOCAB_SIZE:
            raise UsageError(
                f"model.vocab_size: {vocab_size} is too small for data.path 'backcopy'; give at least "
                f"{_MIN_VOCAB_SIZE} (BOS, 3 triggers, 4 ordinary tokens)"
            )
        if seq_len < 2:
            raise UsageError(f"model.max_seq_len: {seq_len} is too short for data.path 'backcopy'; give 2 or more")
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.data_seed = data_seed
        self.split = split
        self.bos = bos
        self._draw_table()

    def _draw_table(self) -> None:
        n_ordinary = self.vocab_size - _FIRST_ORDINARY
        n_successors = min(n_ordinary, _MAX_SUCCESSORS)
        seed = int.from_bytes(stream_key("backcopy table", self.data_seed)[:16], "little")
        rng = np.random.Generator(np.random.Philox(key=seed))
        logits = rng.standard_normal((n_ordinary, n_successors)) * _LOGIT_STD
        weights = np.exp(logits - logits.max(1, keepdims=True))
        successors = (
            np.broadcast_to(np.arange(n_ordinary), (n_ordinary, n_ordinary))
            if n_ordinary == n_successors
            else _distinct(rng, n_ordinary, n_successors)
        )
        trigger_weights = np.exp(rng.standard_normal((n_ordinary, len(TRIGGERS))))
        self._successors = np.concatenate(
            [np.broadcast_to(TRIGGERS, trigger_weights.shape), successors + _FIRST_ORDINARY], axis=1
        ).astype(np.int64)
        self._probabilities = np.concatenate(
            [
                _TRIGGER_PROBABILITY * trigger_weights / trigger_weights.sum(1, keepdims=True),
                (1 - _TRIGGER_PROBABILITY) * weights / weights.sum(1, keepdims=True),
            ],
            axis=1,
        )
        # Row r's cumulative weights lie in (r, r + 1]: one search then serves samples of all rows at once.
        cumulative = self._probabilities.cumsum(1)
        self._search = (cumulative / cumulative[:, -1:] + np.arange(n_ordinary)[:, None]).ravel()

    def next_token_probabilities(self, previous: int) -> np.ndarray:
        """Return the distribution of the token after ``previous`` (BOS or ordinary), float64 ``[vocab_size]``.

        Raises:
            ValueError: ``previous`` is a trigger, after which the token before it decides.
        """
        if previous in TRIGGERS:
            raise ValueError(f"token {previous} is a trigger: what follows is a copy")
        p_V = np.zeros(self.vocab_size)
        if previous == BOS:
            p_V[_FIRST_ORDINARY:] = 1 / (self.vocab_size - _FIRST_ORDINARY)
        else:
            row = previous - _FIRST_ORDINARY
            p_V[self._successors[row]] = self._probabilities[row]
        return p_V

    def next_token_entropy(self) -> np.ndarray:
        """Return the exact entropy of the token after each token, in nats, float64 ``[vocab_size]``; 0 after triggers.

        Its mean over a batch's inputs is the loss of a perfect model on that batch.
        """
        entropy_V = np.zeros(self.vocab_size)
        entropy_V[BOS] = np.log(self.vocab_size - _FIRST_ORDINARY)
        entropy_V[_FIRST_ORDINARY:] = -(self._probabilities * np.log(self._probabilities)).sum(1)
        return entropy_V

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """Return samples ``first_sample`` to ``first_sample + n``: int64 ``[n, seq_len + 1]``."""
        length = self.seq_len + 1
        u_TN = uniforms(
            "backcopy", self.split, self.data_seed, first=first_sample, shape=(n, length)
        ).T  # one contiguous-in-time row per step reads as the recurrence does
        out_TN = np.empty((length, n), dtype=np.int64)
        start = 0
        if self.bos:
            out_TN[0] = BOS
            start = 1
        out_TN[start] = _FIRST_ORDINARY + (u_TN[start] * (self.vocab_size - _FIRST_ORDINARY)).astype(np.int64)
        row_length = self._successors.shape[1]
        flat_successors = self._successors.ravel()
        for t in range(start + 1, length):
            after_trigger = out_TN[t - 1] < _FIRST_ORDINARY
            # Behind a trigger the search reads the token before it: any ordinary row will do, its draw is unused.
            rows = np.where(after_trigger, out_TN[t - 2], out_TN[t - 1]) - _FIRST_ORDINARY
            found = np.searchsorted(self._search, rows + u_TN[t], side="right")
            # Adding the row rounds the draw, at worst up to the next row's first entry.
            found = np.minimum(found, rows * row_length + row_length - 1)
            out_TN[t] = np.where(after_trigger, out_TN[t - 2], flat_successors[found])
        return np.ascontiguousarray(out_TN.T)


def _distinct(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draw ``columns`` different numbers below ``rows`` for each row, int64 ``[rows, columns]``."""
    return np.stack([rng.choice(rows, columns, replace=False) for _ in range(rows)])


def trigger_mask(inputs_BT: Tensor) -> Tensor:
    """Return True where the input token is a trigger, whose target is the copy; bool ``[B, T]``."""
    return (inputs_BT >= TRIGGERS[0]) & (inputs_BT <= TRIGGERS[-1])


def token_texts(ids: Sequence[int]) -> list[str]:
    """Name the tokens: ``BOS``, ``T1`` to ``T3``, then ``a1``, ``a2``, …"""
    return ["BOS" if i == BOS else f"T{i}" if i in TRIGGERS else f"a{i - _FIRST_ORDINARY + 1}" for i in ids]
