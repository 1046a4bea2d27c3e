"""The seed's mark: contraction, preference, and comparisons with birth (definitions §3, §4)."""

from __future__ import annotations

from ..quantity import BIRTH_KNOWN, STRANGERS_MEASURED, AxisName, Column, unlisted

_SITES: tuple[tuple[str, AxisName, str], ...] = (
    ("mlp", "state", "the MLP"),
    ("attention", "layer", "attention"),
)
CONTRACTION = (
    unlisted(
        "inter",
        label="inter contraction",
        definition="Mean cosine between the last block's outputs for different sequences, at the last position "
        "(definitions §3).",
        section="contraction",
        symbol="cos",
        of="inter_mlp",
        by_block=Column("inter", 1, 0),
    ),
    unlisted(
        "intra",
        label="intra contraction",
        definition="Mean cosine between the last block's outputs at different positions of one sequence, averaged over "
        "sequences (definitions §3).",
        section="contraction",
        symbol="cos",
        of="intra_mlp",
        by_block=Column("intra", 2, 0),
    ),
    *(
        unlisted(
            f"{kind}_{site}",
            (axis,),
            label=f"{kind} contraction",
            definition=f"Contraction {across} of the residual stream after {where} (definitions §3).",
            section="contraction",
        )
        for site, axis, where in _SITES
        for kind, across in (("inter", "across sequences"), ("intra", "within them"))
    ),
)

PREFERENCE = (
    unlisted(
        "kl_uniform",
        label="KL(p̄ ‖ uniform)",
        definition="Kullback-Leibler divergence of p̄ from the uniform distribution (definitions §4).",
        unit="nats",
        section="preference",
    ),
    unlisted(
        "preference_ratio",
        definition="V · max p̄, how many times its even share the favourite token gets: 1 is no preference "
        "(definitions §4).",
        format="ratio",
        section="preference",
        symbol="V·max p̄",
        control=1.0,
        control_label="no preference",
        over_training=Column(place=3),
    ),
    unlisted(
        "top1_share",
        label="top-1 share",
        definition="max w, how often the most chosen token is the argmax (definitions §4).",
        format="percent",
        section="preference",
        over_training=Column(place=4, page_only=True),
    ),
    unlisted(
        "coverage_80",
        label="coverage@80",
        definition="Smallest share of the vocabulary that receives 80 % of the argmax choices (definitions §4).",
        format="percent",
        section="preference",
    ),
    unlisted(
        "entropy",
        label="normalised entropy of p̄",
        definition="Entropy of p̄ over log V: 1 is uniform (definitions §4).",
        section="preference",
    ),
    unlisted(
        "entropy_argmax",
        label="normalised entropy of w",
        definition="Entropy of w over log V: 1 is uniform (definitions §4).",
        section="preference",
    ),
    unlisted(
        "mean_prob",
        ("token",),
        label="p̄",
        definition="p̄: mean over sequences of the next-token distribution at the last position (definitions §4).",
        format=".3g",
        section="preference",
    ),
    unlisted(
        "argmax_share",
        ("token",),
        label="w",
        definition="w: how often each token is the argmax; tokens of one logit share the choice (definitions §4).",
        format="percent",
        section="preference",
    ),
)

COMPARED_WITH_BIRTH = (
    unlisted(
        "alignment",
        ("state",),
        label="alignment",
        definition="Mean cosine of the hidden states at the last position with the seed direction (definitions §3).",
        section="direction",
        symbol="cos",
        scalar="last",
        control="alignment_stranger",
        control_label="stranger",
        when=BIRTH_KNOWN,
        over_training=Column(place=1, gives_way=2),
        by_block=Column("align-\nment", 3, 0),
    ),
    unlisted(
        "drift",
        ("state",),
        definition="Cosine between today's mean direction and the seed direction (definitions §3).",
        section="direction",
        symbol="cos",
        scalar="last",
        control=1.0,
        control_label="birth",
        when=BIRTH_KNOWN,
        over_training=Column(place=2, page_only=True),
    ),
    unlisted(
        "energy_share",
        ("state",),
        definition="Share of the hidden states' energy along the seed direction (definitions §3).",
        format="percent",
        section="direction",
        scalar="last",
        control="energy_share_chance",
        control_label="chance",
        when=BIRTH_KNOWN,
    ),
    unlisted(
        "energy_share_chance",
        definition="1/d, the share of energy along a direction without relation (definitions §3).",
        format="percent",
        section="direction",
        when=BIRTH_KNOWN,
    ),
    unlisted(
        "rank_persistence",
        definition="Spearman's ρ of p̄ against birth (definitions §4).",
        section="persistence",
        symbol="ρ",
        control="rank_persistence_stranger",
        control_label="stranger",
        when=BIRTH_KNOWN,
        over_training=Column(place=5),
    ),
    unlisted(
        "kendall_tau",
        label="Kendall τ",
        definition="Kendall's τ-b of p̄ against birth (definitions §4).",
        section="persistence",
        symbol="τ",
        when=BIRTH_KNOWN,
        over_training=Column(place=6, page_only=True),
    ),
    *(
        unlisted(
            f"overlap_{k}",
            label=f"overlap@{k}",
            definition=f"Share of the {k} most preferred tokens that are those of birth (definitions §4).",
            format=".2f",
            section="persistence",
            when=f"{BIRTH_KNOWN}, and V is at least {k}",
            over_training=Column(place=7, page_only=True) if k == 100 else None,
        )
        for k in (10, 100, 1000)
    ),
    unlisted(
        "rbo",
        label="rank-biased overlap",
        definition="Rank-biased overlap of the order of preference with birth's (definitions §4).",
        section="persistence",
        when=BIRTH_KNOWN,
    ),
    unlisted(
        "alignment_stranger",
        ("stranger", "state"),
        label="alignment with strangers",
        definition="Alignment with each stranger's seed direction; as a scalar the largest absolute one of the last "
        "block. A stranger is a birth of the same config from another seed (definitions §3).",
        section="direction",
        scalar="max",
        when=STRANGERS_MEASURED,
    ),
    unlisted(
        "rank_persistence_stranger",
        ("stranger",),
        label="rank persistence of strangers",
        definition="Spearman's ρ of p̄ against each stranger's; as a scalar the largest absolute one (definitions §4).",
        section="persistence",
        scalar="max",
        when=STRANGERS_MEASURED,
    ),
    unlisted(
        "mean_direction",
        ("state", "channel"),
        definition="Normalised mean hidden state; at step 0 it is the seed direction (definitions §3).",
        section="direction",
    ),
)

AT_BIRTH = (
    unlisted(
        "stranger_direction",
        ("stranger", "state", "channel"),
        label="strangers' seed directions",
        definition="Seed direction of each stranger (definitions §3).",
        section="direction",
        when="it is the snapshot at birth, and births of other seeds are measured",
    ),
    unlisted(
        "stranger_mean_prob",
        ("stranger", "token"),
        label="strangers' p̄",
        definition="p̄ of each stranger (definitions §4).",
        section="preference",
        when="it is the snapshot at birth, and births of other seeds are measured",
    ),
)
