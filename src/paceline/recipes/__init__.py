"""Ready-made trainings: each recipe is an ordinary script. This table is read without torch."""

RECIPES = {
    "toy": "a linear model on 2,048 samples: `paceline train toy [EPOCHS] [SAVE_EVERY]`",
    "mnist": "a convolutional network on handwritten digits: built-in, from IDX files, or from shards",
    "gpt": "a GPT on text (bytes, characters or tokens): `paceline train gpt [STEPS] [SAVE_EVERY]`",
}
