"""From conversations to tokens: datasets, chat templates, loss masks, draft vocabularies."""
