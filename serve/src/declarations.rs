//! Checks of what a program has declared, before a server starts.

use tensord_client::Secret;

use crate::{
    http::Page,
    model::{Batching, Model},
    signature::{BATCH, TensorSpec},
};

/// Most replicas of a model.
const MAX_REPLICAS: usize = 4096;

/// Most rows that may wait for a model.
const MAX_QUEUE: usize = 1 << 20;

/// Checks what the types of models do not.
///
/// # Errors
///
/// What is wrong, with its value and what is right.
pub(crate) fn check_models(models: &[Model]) -> Result<(), String> {
    if models.is_empty() {
        return Err("the server has no model; add one with `Serve::model`".into());
    }
    for (index, model) in models.iter().enumerate() {
        let (name, version) = (&model.name, &model.version);
        let mut before = models[..index].iter();
        if before.any(|it| it.name == *name && it.version == *version) {
            return Err(format!(
                "there are two models `{name}` of version `{version}`; versions must differ"
            ));
        }
        check_model(model)
            .map_err(|reason| format!("model `{name}`, version `{version}`: {reason}"))?;
    }
    Ok(())
}

fn check_model(model: &Model) -> Result<(), String> {
    if !is_part_of_url(&model.name) || !is_part_of_url(&model.version) {
        return Err(
            "names and versions are a part of URLs, so they have letters, digits, `-`, `_` and `.`"
                .into(),
        );
    }
    check_ports(&model.inputs)?;
    check_ports(&model.outputs)?;
    let replicas = &model.replicas;
    if replicas.is_empty() || *replicas.end() == 0 {
        return Err(format!(
            "{replicas:?} replicas are none; use 1..=1, for example"
        ));
    }
    let Batching {
        max_size,
        max_queue,
        ..
    } = model.batching;
    if *replicas.end() > MAX_REPLICAS || max_queue > MAX_QUEUE {
        return Err(format!(
            "up to {} replicas and a queue of {max_queue} rows; at most {MAX_REPLICAS} and {MAX_QUEUE} are possible",
            replicas.end()
        ));
    }
    if max_size == 0 || max_queue < max_size {
        return Err(format!(
            "batches of up to {max_size} rows and a queue of {max_queue}; a batch has at least one row, and the queue has \
             at least one batch"
        ));
    }
    Ok(())
}

fn is_part_of_url(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.chars().all(is_plain) && !text.chars().all(|c| c == '.')
}

/// Checks the inputs or the outputs of a model.
fn check_ports(ports: &[TensorSpec]) -> Result<(), String> {
    for (index, port) in ports.iter().enumerate() {
        let name = &port.name;
        if name.is_empty() {
            return Err("an input or output has no name".into());
        }
        if ports[..index].iter().any(|it| it.name == *name) {
            return Err(format!(
                "there are two inputs or outputs `{name}`; names must differ"
            ));
        }
        if let Some(size) = port.shape.iter().find(|size| **size < BATCH) {
            return Err(format!(
                "`{name}` has a dimension of {size}; a dimension is `BATCH` or a size"
            ));
        }
    }
    Ok(())
}

/// Checks that tokens can be sent, and are not empty.
///
/// # Errors
///
/// What is wrong, without the token.
pub(crate) fn check_tokens(tokens: &[Secret]) -> Result<(), String> {
    let is_token = |it: &Secret| {
        let text = it.reveal();
        !text.is_empty() && text.bytes().all(|c| c.is_ascii_graphic())
    };
    match tokens.iter().all(is_token) {
        true => Ok(()),
        false => Err(
            "a token is empty, or has blanks or other characters that no header may have".into(),
        ),
    }
}

/// Checks the paths of pages.
///
/// # Errors
///
/// As [`check_models`].
pub(crate) fn check_pages(pages: &[Page]) -> Result<(), String> {
    let reserved = ["/v2", "/metrics", "/inference."];
    for (index, page) in pages.iter().enumerate() {
        let path = &page.path;
        let is_plain = path.starts_with('/') && !path.contains(['{', '}', '*']);
        if !is_plain || reserved.iter().any(|it| path.starts_with(it)) {
            return Err(format!(
                "a page cannot be at `{path}`; use `/` or a path of its own, like `/draw`"
            ));
        }
        if pages[..index].iter().any(|it| it.path == *path) {
            return Err(format!("there are two pages at `{path}`"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::Port;

    fn model(input: &str, output: [i64; 2]) -> Model {
        let (input, output) = (Port::f32(input, [BATCH, 4]), Port::f32("y", output));
        Model::new("m", input, output, |_: &Device| {
            Ok::<_, Infallible>(|x: Tensor<2>| x)
        })
    }

    #[track_caller]
    fn check(models: Vec<Model>, expected: Result<(), &str>) {
        let found = check_models(&models);
        assert_eq!(found.as_ref().map_err(String::as_str).copied(), expected);
    }

    #[test]
    fn declarations_that_cannot_be_served_are_named() {
        let good = || model("x", [BATCH, 4]);
        check(vec![good(), good().version("2")], Ok(()));
        check(
            vec![],
            Err("the server has no model; add one with `Serve::model`"),
        );
        check(
            vec![good(), good()],
            Err("there are two models `m` of version `1`; versions must differ"),
        );
        let url =
            "names and versions are a part of URLs, so they have letters, digits, `-`, `_` and `.`";
        for version in ["", "..", "a/b", "ä"] {
            let error = format!("model `m`, version `{version}`: {url}");
            check(vec![good().version(version)], Err(&error));
        }
        check(
            vec![model("", [BATCH, 4])],
            Err("model `m`, version `1`: an input or output has no name"),
        );
        check(
            vec![model("x", [BATCH, -2])],
            Err(
                "model `m`, version `1`: `y` has a dimension of -2; a dimension is `BATCH` or a size",
            ),
        );
        check(
            vec![good().replicas(0..=0)],
            Err("model `m`, version `1`: 0..=0 replicas are none; use 1..=1, for example"),
        );
        let batching = Batching {
            max_size: 8,
            max_queue: 7,
            ..Batching::default()
        };
        let error = "model `m`, version `1`: batches of up to 8 rows and a queue of 7; a batch has at least one row, and \
                     the queue has at least one batch";
        check(vec![good().batching(batching)], Err(error));
    }

    #[test]
    fn an_empty_token_is_refused() {
        let check = |token: &str| check_tokens(&[Secret::new("good"), Secret::new(token)]).is_ok();
        assert!(check("5f2c-_.~+/="));
        assert!(!check("") && !check(" ") && !check("a b") && !check("ä"));
    }

    #[test]
    fn numbers_that_no_server_can_have_are_refused() {
        let good = || model("x", [BATCH, 4]);
        assert!(check_models(&[good().replicas(1..=usize::MAX)]).is_err());
        let endless = Batching {
            max_queue: usize::MAX,
            ..Batching::default()
        };
        assert!(check_models(&[good().batching(endless)]).is_err());
    }

    #[test]
    fn pages_have_paths_of_their_own() {
        let check = |paths: &[&str], is_right: bool| {
            let pages = paths.iter().map(|path| Page {
                path: (*path).into(),
                html: "",
            });
            let found = check_pages(&pages.collect::<Vec<_>>());
            assert_eq!(found.is_ok(), is_right, "{paths:?}: {found:?}");
        };
        check(&["/", "/draw"], true);
        check(&["/", "/"], false);
        check(&["draw"], false);
        check(&["/v2/x"], false);
        check(&["/{x}"], false);
    }
}
