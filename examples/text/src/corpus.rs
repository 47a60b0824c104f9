//! Sentences about four topics, made from templates, and a tokenizer of words.

use std::collections::HashMap;

/// Number of topics.
pub(crate) const TOPICS: usize = 4;

/// The token that fills short sentences.
pub(crate) const PADDING: i32 = 0;

/// The token of a word that the training sentences do not have.
const UNKNOWN: i32 = 1;

/// What the sentences of one topic are made of.
struct Topic {
    subjects: [&'static str; 6],
    verbs: [&'static str; 5],
    objects: [&'static str; 6],
}

const WORDS: [Topic; TOPICS] = [
    Topic {
        subjects: [
            "the rain",
            "a storm",
            "the wind",
            "fog",
            "the frost",
            "sunshine",
        ],
        verbs: ["reached", "covered", "left", "cooled", "surprised"],
        objects: [
            "the coast",
            "the hills",
            "the valley",
            "the harbour",
            "the north",
            "the fields",
        ],
    },
    Topic {
        subjects: [
            "the cook",
            "my aunt",
            "the baker",
            "our guest",
            "the waiter",
            "a chef",
        ],
        verbs: ["tasted", "covered", "left", "served", "burned"],
        objects: [
            "the soup",
            "a cake",
            "the bread",
            "the onions",
            "some rice",
            "the salad",
        ],
    },
    Topic {
        subjects: [
            "the keeper",
            "our team",
            "the runner",
            "the referee",
            "a rower",
            "the coach",
        ],
        verbs: ["won", "reached", "left", "missed", "surprised"],
        objects: [
            "the match",
            "the final",
            "the goal",
            "the race",
            "the league",
            "the tournament",
        ],
    },
    Topic {
        subjects: [
            "the violinist",
            "the choir",
            "a drummer",
            "the band",
            "the singer",
            "an organist",
        ],
        verbs: ["played", "surprised", "left", "rehearsed", "missed"],
        objects: [
            "the concert",
            "a sonata",
            "the chorus",
            "the opera",
            "a song",
            "the audience",
        ],
    },
];

/// What sentences of all topics begin and end with. The lengths differ, so batches have
/// padding.
const BEGINNINGS: [&str; 6] = [
    "",
    "yesterday",
    "on sunday morning",
    "as everybody knows",
    "after a long and quiet week",
    "to the delight of the whole town",
];
const ENDINGS: [&str; 5] = [
    "",
    "again",
    "in the evening",
    "for the first time this year",
    "and nobody had expected that at all",
];

/// A sentence and its topic.
#[derive(Clone, Debug)]
pub(crate) struct Sentence {
    pub(crate) text: String,
    pub(crate) topic: usize,
}

/// Returns every sentence of the templates, in an order that mixes the topics. It is the same
/// on each call.
fn all() -> Vec<Sentence> {
    let mut sentences = Vec::new();
    for (topic, words) in WORDS.iter().enumerate() {
        for subject in words.subjects {
            for verb in words.verbs {
                for object in words.objects {
                    for beginning in BEGINNINGS {
                        for ending in ENDINGS {
                            let text = format!("{beginning} {subject} {verb} {object} {ending}");
                            let text = text.trim().to_owned();
                            sentences.push(Sentence { text, topic });
                        }
                    }
                }
            }
        }
    }
    shuffle(&mut sentences);
    sentences
}

/// Shuffles by Fisher and Yates's method, with the numbers of a linear congruential generator.
fn shuffle<T>(items: &mut [T]) {
    let mut state = 42u64;
    for last in (1..items.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        items.swap(last, (state >> 33) as usize % (last + 1));
    }
}

/// Sentences for training and for testing. No sentence is in both.
pub(crate) struct Corpus {
    pub(crate) train: Vec<Sentence>,
    pub(crate) test: Vec<Sentence>,
}

impl Corpus {
    pub(crate) fn new() -> Self {
        let mut train = all();
        let test = train.split_off(train.len() - 256);
        Self { train, test }
    }
}

/// Gives every word of the training sentences a number.
#[derive(Clone, Debug)]
pub(crate) struct Tokenizer {
    tokens: HashMap<String, i32>,
    longest: usize,
}

impl Tokenizer {
    pub(crate) fn new(sentences: &[Sentence]) -> Self {
        let mut tokens = HashMap::new();
        let mut longest = 0;
        for sentence in sentences {
            let words = sentence.text.split_whitespace();
            longest = longest.max(words.clone().count());
            for word in words {
                let next = UNKNOWN + 1 + tokens.len() as i32;
                tokens.entry(word.to_lowercase()).or_insert(next);
            }
        }
        Self { tokens, longest }
    }

    /// Number of tokens, with those for padding and unknown words.
    pub(crate) fn size(&self) -> usize {
        self.tokens.len() + 2
    }

    /// Most words of a training sentence. Longer sentences are cut.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Returns the tokens of `text`, at most [`longest`](Self::longest).
    pub(crate) fn encode(&self, text: &str) -> Vec<i32> {
        let token = |word: &str| self.tokens.get(&word.to_lowercase()).copied();
        let tokens = text.split_whitespace().take(self.longest);
        tokens.map(|word| token(word).unwrap_or(UNKNOWN)).collect()
    }

    /// Returns the tokens of all `sentences`, one after the other, and how many each has:
    /// those of the longest one. The others are filled up.
    pub(crate) fn encode_batch(&self, sentences: &[Sentence]) -> (Vec<i32>, usize) {
        let encoded = sentences.iter().map(|sentence| self.encode(&sentence.text));
        let encoded: Vec<_> = encoded.collect();
        let length = encoded.iter().map(Vec::len).max().unwrap_or(0);
        let padded = encoded.into_iter().flat_map(|mut tokens| {
            tokens.resize(length, PADDING);
            tokens
        });
        (padded.collect(), length)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn training_and_test_sentences_differ_and_have_all_topics() {
        let Corpus { train, test } = Corpus::new();
        assert_eq!(train.len() + test.len(), TOPICS * 6 * 5 * 6 * 6 * 5);
        let known: HashSet<_> = train.iter().map(|sentence| &sentence.text).collect();
        assert_eq!(known.len(), train.len(), "a sentence occurs twice");
        for sentence in &test {
            assert!(!known.contains(&sentence.text), "{}", sentence.text);
        }
        for sentences in [&train[..64], &test] {
            for topic in 0..TOPICS {
                let count = sentences.iter().filter(|one| one.topic == topic).count();
                assert!(count * 8 > sentences.len(), "topic {topic}: {count}");
            }
        }
        assert_eq!(Corpus::new().train[0].text, train[0].text);
    }

    #[test]
    fn words_become_tokens_and_short_sentences_are_filled_up() {
        let sentence = |text: &str| Sentence {
            text: text.to_owned(),
            topic: 0,
        };
        let tokenizer = Tokenizer::new(&[sentence("The rain  left"), sentence("rain again")]);
        assert_eq!((tokenizer.size(), tokenizer.longest()), (6, 3));
        let cases = [
            ("the rain left", vec![2, 3, 4]),
            ("AGAIN rain", vec![5, 3]),
            ("rain in spain", vec![3, 1, 1]),
            ("rain rain rain rain", vec![3, 3, 3]),
            ("", vec![]),
        ];
        for (text, tokens) in &cases {
            assert_eq!(&tokenizer.encode(text), tokens, "{text}");
        }
        let batch = [sentence("rain"), sentence("the rain left"), sentence("")];
        let (tokens, length) = tokenizer.encode_batch(&batch);
        assert_eq!(length, 3);
        assert_eq!(tokens, [3, 0, 0, 2, 3, 4, 0, 0, 0]);
        assert_eq!(tokenizer.encode_batch(&[]), (vec![], 0));
    }
}
