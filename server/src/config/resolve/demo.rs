//! Settings of `tensord demo`.

use tensord_transport::Secret;

use super::{Layers, pool_url::pool_url};
use crate::config::{
    ConfigError, DemoConfig,
    settings::{DemoSettings, UrlSettings},
    values::{Devices, Name},
};

impl Layers<'_> {
    pub(super) fn demo(
        self,
        settings: DemoSettings,
        url: UrlSettings,
    ) -> Result<DemoConfig, ConfigError> {
        let pool = match settings.url {
            Some(Some(url)) => Some(pool_url(&Secret::new(url), "--url".into())?),
            Some(None) => Some(self.url(url)?),
            None if url.url_file.is_some() => Some(self.url(url)?),
            None => None,
        };
        let kind = settings.kind.map(|Name(kind)| kind);
        if let (None, Some(kind)) = (&pool, &kind) {
            if kind == "auto" {
                let text = "--kind auto: the demo needs a kind, such as flex or cuda";
                return Err(ConfigError::CommandLine(text.into()));
            }
            if let Err(e) = kind.parse::<Devices>() {
                return Err(ConfigError::CommandLine(format!("--kind {kind}: {e}")));
            }
        }
        if settings.chaos && pool.is_some() {
            return Err(ConfigError::CommandLine(
                "--chaos kills workers, so it needs a pool of its own; leave out --url".into(),
            ));
        }
        Ok(DemoConfig {
            model: settings.model,
            devices: settings.devices.0,
            kind,
            pool,
            epochs: settings.epochs.map(|epochs| epochs as usize),
            artifacts: settings.artifacts,
            chaos: settings.chaos,
            json: settings.json,
            quiet: settings.quiet,
        })
    }
}
