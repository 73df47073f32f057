"""What can be run right away. The table is read without torch; each recipe is an ordinary script."""

RECIPES = {
    "toy": "a linear model on 2,048 samples: `paceline train toy [EPOCHS] [SAVE_EVERY]`",
    "mnist": "a convolutional network on handwritten digits, embedded from IDX files, or from shards",
    "gpt": "a small GPT on text, by bytes, characters or tokens: `paceline train gpt [STEPS] [SAVE_EVERY]`",
}
