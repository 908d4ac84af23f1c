"""Texts from a decoder: many requests at once, with the network that trains.

| module | what |
|---|---|
| engine | takes requests, does steps, hands out tokens: the door of the room |
| sequence, scheduler | one request's tokens, and which tokens of whom the next step computes |
| blocks | which block of memory holds which tokens; blocks that requests share |
| tiers, tier_folder, offload | blocks that leave the memory, and whether fetching them pays |
| layers | weights that are not all in the device's memory |
| paged, runner | attention over blocks, and the forward pass of the tokens of several sequences |
| packed, exact | its products made faster, or results with the same bits in any company |
| quantised, prices | matrices in 8 or 4 bits, and what each form takes here |
| choice | the next token from its logits |
| speculation, gain, guessers | tokens guessed, to compute several at once, where that pays |
| draft, head_guesser | those that small networks and heads guess |
| score | how likely a network holds texts that are given |
| embed | texts as vectors |
| chat | a conversation as a prompt, and which of a text its answers are |
| text | tokens as text that may be shown, and where a stop string ends it |

Not here: what listens to a network, reads runs or measures (`paceline.serve`).
"""
